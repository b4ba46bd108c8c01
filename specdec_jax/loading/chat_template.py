"""Chat templates as transformers renders them: Jinja in a sandbox, because a template comes with somebody's weights."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; here its body is only rendered."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Without underscore names: a stored `__call__` or the like leads out of the sandbox."""

    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace")
        super().__setitem__(name, value)


def render(template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], generate: bool) -> str:
    """The text of a conversation.

    `messages` are {"role": ..., "content": ...}; `special` the names a template may use (`bos_token`, ...); `generate`
    opens the assistant's turn at the end. Raises ValueError with the template's own complaint.
    """
    try:
        return _compiled(template).render(
            messages=list(messages), tools=None, documents=None, add_generation_prompt=generate, **special
        )
    except (jinja2.exceptions.TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
