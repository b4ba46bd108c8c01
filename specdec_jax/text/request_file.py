"""A file of requests: one JSON object per line, each checked separately, so that an invalid one stops no other."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec_jax.decoding.state import fresh_request
from specdec_jax.ranges import Between, ranges_of, shortened
from specdec_jax.strategy import nearest
from specdec_jax.text.generation import Generation, Request, prepare
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.pair import Pair
from specdec_jax.text.sampling_params import SamplingParams

SAMPLING = ranges_of(SamplingParams)  # of the fields that are numbers
HYPERPARAMETERS = ("policy", "verifier")
FIELDS = ("prompt", "turns", "system", "id", "category", "split", "stop", *SAMPLING, *HYPERPARAMETERS)
NUMBERS = Between(-(2**53), 2**53, entries=0)  # hyperparameters; beyond it floating point is not exact
COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")
LOG_PROBS = ("log_probs", "warped_log_probs")


@dataclass(frozen=True)
class Defaults:
    """Default values of missing fields; by default request i has seed + i."""

    sampling: SamplingParams = SamplingParams()
    chat: bool = True
    system: str | None = None
    parse_special: bool = False
    calibration: str | None = None


def read_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, its fields not yet checked.

    Raises:
        ValueError: the line is not a JSON object.
    """
    try:
        fields = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON object is wanted, this is a {type(fields).__name__}")
    return fields


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number there")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown fields, values of a wrong type, and a missing prompt."""
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"no field {shortened(name)}{nearest(name, FIELDS)}")
    if ("prompt" in fields) == ("turns" in fields):
        raise ValueError("there are both prompt and turns" if "turns" in fields else "there is no prompt")
    for name, value in fields.items():
        SAMPLING[name].check(name, value) if name in SAMPLING else _CHECKS[name](name, value)


def request_of(pair: Pair, fields: Mapping[str, Any], defaults: Defaults, number: int) -> Request:
    """The checked request of a line's fields; `number` counts the requests of the file from 0.

    `prompt` is text, or messages with role and content; `turns` a list of one text; `policy` and `verifier` are objects
    of hyperparameters, `id` is passed on to the result, `category` and `split` are not.

    Raises:
        ValueError: invalid fields.
    """
    check_fields(fields)
    changes = {name: fields[name] for name in (*SAMPLING, "stop") if name in fields}
    changes.setdefault("seed", (defaults.sampling.seed + number) % 2**32)
    sampling = dataclasses.replace(defaults.sampling, **changes)
    system = fields.get("system", defaults.system)
    prompts = [fields["prompt"]] if "prompt" in fields else fields["turns"]
    options = {name: getattr(defaults, name) for name in ("chat", "parse_special", "calibration")}
    request = prepare(pair, prompts, sampling, system=system, **options)
    for kind in HYPERPARAMETERS:
        name = f"{kind}_hyperparameters"
        if kind in fields:
            request.options[name] = {**request.options.get(name, {}), **fields[kind]}
    fresh_request(pair.decoder.parts, request.prompts, **request.options)
    return request


def result_line(number: int, fields: Mapping[str, Any], result: Generation, with_tokens: bool) -> bytes:
    """A line of the output: line number, id, text, finish reason, requested fields, and counts; no times."""
    counts = {name: result.statistics[name] for name in COUNTS}
    text = {"text": result.text, "finish_reason": result.finish_reason}
    tokens = {"tokens": result.tokens} if with_tokens else {}
    log_probs = {name: values for name in LOG_PROBS if (values := getattr(result, name)) is not None}
    sizes = {"num_prompt_tokens": len(result.prompt_tokens), "num_tokens": len(result.tokens)}
    return _line({"line": number, **_id(fields), **text, **tokens, **log_probs, **sizes, **counts})


def error_line(number: int, fields: Mapping[str, Any], error: Exception) -> bytes:
    """A line of the output for an invalid request."""
    return _line({"line": number, **_id(fields), "error": " ".join(str(error).split())})


def _id(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": fields["id"]} if isinstance(fields.get("id"), (str, int, float)) else {}


def _line(content: Mapping[str, Any]) -> bytes:
    # a lone surrogate has no UTF-8 encoding and is written as a JSON escape
    return json_text(content).encode("utf-8", "backslashreplace") + b"\n"


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shortened(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{name} is not valid Unicode: {shortened(value)} has half a surrogate pair")


def _check_prompt(name: str, value: Any) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the prompt is empty")
        return _check_text(name, value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"prompt must be text or a list of messages, got {shortened(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"message {index} of the prompt must have role and content, got {shortened(message)}")
        for key, text in message.items():
            _check_text(f"{key} of message {index}", text)


def _check_turns(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
        raise ValueError(f"{name} must be a list of one text, got {shortened(value)}")
    _check_prompt(name, value[0])


def _check_stop(name: str, value: Any) -> None:
    for text in value if isinstance(value, list) else [value]:
        _check_text(name, text)


def _check_hyperparameters(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object of hyperparameters, got {shortened(value)}")
    for key, number in value.items():
        NUMBERS.check(f"{shortened(key)} of {name}", number)


def _check_id(name: str, value: Any) -> None:
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name} must be text or a number, got {shortened(value)}")


_CHECKS = {
    "prompt": _check_prompt,
    "system": _check_text,
    "turns": _check_turns,
    **dict.fromkeys(("id", "category", "split"), _check_id),
    "stop": _check_stop,
    **dict.fromkeys(HYPERPARAMETERS, _check_hyperparameters),
}
