"""A recorded generation as one self-contained HTML file: its text token by token, a chart and a table."""

import base64
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdec_jax.app.views.charting import chart
from specdec_jax.app.views.printing import ENDS, one_line
from specdec_jax.app.views.tokens import PHASES, Token, phases_of, tokens_of
from specdec_jax.loading import Tokenizer
from specdec_jax.loading.new_folder import check_file, replacing
from specdec_jax.text.generation import Generation
from specdec_jax.text.streaming import Stream
from specdec_jax.types import StoppingPolicy

KINDS = {
    "accepted": "accepted draft",
    "branch": "of a tree, accepted in place of a rejected draft",
    "recovered": "the target's, in place of a rejected draft",
    "bonus": "the target's own",
}


def save_drawing(command: Any, prompt: str, policy: StoppingPolicy, chunks: Stream) -> None:
    """Writes the page of the `generate` command with the whole generation."""
    models, rules, decoding = command.models, command.rules, command.decoding
    details = {
        "prompt": prompt,
        "target": models.target,
        "drafter": models.drafter,
        "policy": rules.policy,
        "verifier": rules.verifier,
        "temperature": f"{decoding.temperature:g}",
        "seed": str(decoding.seed),
    }
    # Other policies than AdaEDL have no factor and other kinds of thresholds.
    factor = float(policy.hyperparameters["entropy_factor"]) if policy.name == "adaedl" else None
    drawn: dict[str, Any] = {"title": one_line(prompt), "details": details, "entropy_factor": factor}
    print("page:", save_page(command.output.page, chunks.result(), chunks.tokenizer, **drawn), file=sys.stderr)


def save_page(
    path: str | Path,
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    title: str = "A decoded text",
    entropy_factor: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the page atomically and returns its path. It has light and dark modes and adapts to the screen's width.

    Args:
        entropy_factor: AdaEDL's; with it the chart has the bound 1 - sqrt(factor * entropy), which AdaEDL compares with
            lambda. For other policies the chart shows the threshold with the drafter's largest probability instead.
        details: further rows of the table: the prompt, the models, the policy.

    Raises:
        ValueError: the generation was not recorded, or the file cannot be written.
    """
    text = page(generation, tokenizer, title=title, entropy_factor=entropy_factor, details=details)
    check_file(path)
    with replacing(Path(path).expanduser()) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def page(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    title: str = "A decoded text",
    entropy_factor: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> str:
    """The HTML. The model's text is escaped, and only the page's own script may run."""
    tokens = tokens_of(generation, tokenizer)
    loader = PackageLoader("specdec_jax.app.views")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        title=title,
        line=_line(generation),
        tokens=[_drawn(token, tokenizer) for token in tokens],
        branches=any(token.kind == "branch" for token in tokens),
        phases=phases_of(tokens),
        chart=chart(tokens, entropy_factor),
        factor=entropy_factor,
        figures=[*(details or {}).items(), *_figures(generation, tokens)],
        tips=[_tip(token, tokenizer) for token in tokens],
        style=style,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _drawn(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token for the template. Without text it is a symbol: a stop for an end, a dot for part of a character."""
    return {
        "kind": token.kind,
        "first": token.first,
        "phase": token.phase,
        "text": token.text,
        "name": _name(token, tokenizer),
        "shown": "" if token.text else ("■" if token.ends else "·"),
        "rejected": [draft.text.replace("\n", "↵") for draft in token.rejected],
    }


def _name(token: Token, tokenizer: Tokenizer) -> str:
    return token.text or tokenizer.decode([token.id], skip_special=False)


def _tip(token: Token, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    rows = [
        ("token", f"{_name(token, tokenizer).replace(chr(10), '↵')!r} ({token.id})"),
        ("kind", "end of sequence, " + KINDS[token.kind] if token.ends else KINDS[token.kind]),
        ("entropy H", _figure(token.entropy, " nats")),
        ("max probability", _figure(token.max_prob)),
        ("λ of the round", _figure(token.threshold)),
        ("round", f"{token.round + 1}"),
        ("drafter", f"{token.drafter}"),
        ("phase", PHASES[min(token.phase, 1)]),
    ]
    if token.rejected:
        rows.append(("rejected here", "".join(draft.text for draft in token.rejected).replace("\n", "↵")))
    return rows


def _figure(value: float, unit: str = "") -> str:
    return f"{value:.3f}{unit}" if math.isfinite(value) else "–"


def _line(generation: Generation) -> str:
    rate = generation.statistics["draft_acceptance_rate"]
    accepted = "nothing drafted" if rate is None else f"{rate:.0%} of drafts accepted"
    return f"{len(generation.tokens)} tokens, {accepted}, {ENDS[generation.finish_reason]}"


def _figures(generation: Generation, tokens: Sequence[Token]) -> list[tuple[str, str]]:
    """The rows of the table: counts and rates with their usual names."""
    rows = [("tokens", str(len(tokens)))]
    if generation.seconds > 0:
        rows.append(("tokens/s", f"{len(tokens) / generation.seconds:.1f}"))
    for name, value in generation.statistics.items():
        if isinstance(value, list):
            shown = "  ".join("–" if entry is None else f"{entry:.2f}".removesuffix(".00") for entry in value)
        elif isinstance(value, float):
            shown = f"{value:.3f}"
        else:
            shown = "–" if value is None else str(value)
        rows.append((name.replace("_", " ").replace("num ", ""), shown))
    inside = sum(end - begin for begin, end in phases_of(tokens))
    return [*rows, ("tokens in reasoning phases", str(inside))]
