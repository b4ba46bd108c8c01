"""A recorded generation, token by token, and as one self-contained HTML file with a chart and a table."""

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from specdec_jax.app.settings import Settings
from specdec_jax.app.views.printing import ENDS
from specdec_jax.decoding.summaries import kinds_of
from specdec_jax.loading import StreamDecoder, Tokenizer
from specdec_jax.loading.new_folder import check_file, write_text
from specdec_jax.text.escapes import one_line, shown
from specdec_jax.text.generation import Generation
from specdec_jax.text.streaming import CONTEXT, text_after
from specdec_jax.types import StoppingPolicy

LEFT, STRIP, GAP, TOP = 44, 110, 26, 10  # pixels
WIDTH, NARROWEST, WIDEST = 900, 10, 22  # width of the chart, and range of a token's column
TICKS = 4
PHASES = ("routine", "reasoning")
KINDS = {
    "accepted": "accepted draft",
    "branch": "of a tree, accepted in place of a rejected draft",
    "recovered": "the target's, in place of a rejected draft",
    "bonus": "the target's own",
}


class Rejected(NamedTuple):
    """A rejected draft."""

    id: int
    text: str
    entropy: float  # nats, of the drafter's distribution it was drawn from; NaN: unknown
    max_prob: float


class Token(NamedTuple):
    """One emitted token. `entropy` and `max_prob` are of the drafter's distribution there, NaN where no pass looked."""

    id: int
    text: str  # whole characters that this token completes; all texts together are Generation.text
    kind: str  # as in `decoding.summaries.kinds_of`
    ends: bool  # whether it is the end of sequence, without text
    rejected: tuple[Rejected, ...]  # rejected drafts from this position on, which the target's token replaced
    entropy: float  # nats
    max_prob: float
    threshold: float  # the policy's threshold in this round, in its own units; NaN if it has none
    round: int  # from 0
    first: bool  # whether it is the first of its round
    phase: int  # 0 routine, 1 reasoning
    drafter: int


def tokens_of(generation: Generation, tokenizer: Tokenizer) -> list[Token]:
    """The tokens of a generation with rounds (`generate(..., record=True)`), in order.

    Raises:
        ValueError: it was not recorded, or its rounds are not those of its tokens.
    """
    if generation.rounds is None:
        raise ValueError("this generation has no rounds to draw: decode it with record=True")
    emitted = sum(int(round_["emitted"]) for round_ in generation.rounds)
    if emitted != len(generation.tokens):
        raise ValueError(f"the rounds emitted {emitted} tokens, the generation has {len(generation.tokens)}")
    tokens: list[Token] = []
    decoder, text_left = StreamDecoder(tokenizer), len(generation.text)  # a stop string ends the text earlier
    spoken = emitted - (generation.finish_reason == "stop")  # tokens with text: an end of sequence has none
    for index, round_ in enumerate(generation.rounds):
        begin, accepted, drafted = len(tokens), int(round_["accepted"]), int(round_["drafted"])
        new, kinds = generation.tokens[begin : begin + int(round_["emitted"])], kinds_of(round_)
        # None, the JSON form of NaN, becomes NaN again
        entropy, max_prob = (
            np.pad(np.asarray(round_[name], np.float32), (0, drafted + emitted), constant_values=np.nan).tolist()
            for name in ("entropy", "max_prob")
        )
        before, rejected = [*generation.tokens[max(begin - CONTEXT, 0) : begin], *new[:accepted]], []
        # A round that ended within its accepted drafts has no token of the target, and its further drafts are wasted.
        for place in range(accepted, drafted) if len(new) > accepted else ():
            token = int(round_["proposed"][place])
            text = text_after(tokenizer, before, [token], skip_special=False)  # shows an end of sequence, too
            rejected.append(Rejected(token, text, entropy[place], max_prob[place]))
            before.append(token)
        for place, token in enumerate(new):
            text = decoder.push([token]) if len(tokens) < spoken else ""
            text = (text + (decoder.flush() if len(tokens) == spoken - 1 else ""))[:text_left]
            text_left -= len(text)
            tokens.append(
                Token(
                    id=int(token),
                    text=text,
                    kind=kinds[place],
                    ends=len(tokens) == spoken,
                    rejected=tuple(rejected) if place == accepted else (),
                    entropy=entropy[place],
                    max_prob=max_prob[place],
                    threshold=float(np.asarray(round_["threshold"], np.float32)),
                    round=index,
                    first=place == 0,
                    phase=int(round_["phase"]),
                    drafter=int(round_["drafter_id"]),
                )
            )
    return tokens


def phases_of(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """The reasoning phases as half-open ranges (first, last + 1) of positions."""
    inside = [False, *(token.phase == 1 for token in tokens), False]
    turns = [i for i in range(len(inside) - 1) if inside[i] != inside[i + 1]]
    return list(zip(turns[::2], turns[1::2], strict=True))


def bound(entropy: float, entropy_factor: float) -> float:
    """AdaEDL's lower bound on the acceptance probability, 1 - sqrt(factor * entropy) (arXiv 2410.18351), which it
    compares with lambda; at least 0."""
    return max(1.0 - math.sqrt(entropy_factor * entropy), 0.0) if entropy >= 0 else math.nan


def save_drawing(path: Path, result: Generation, tokenizer: Tokenizer, prompt: str, settings: Settings) -> None:
    """Writes the page of a recorded generation with the prompt and the settings that it was decoded with."""
    names = ("target", "drafter", "policy", "verifier", "temperature", "seed")
    details = {"prompt": prompt} | {name: f"{getattr(settings, name)}" for name in names}
    save_page(path, result, tokenizer, title=one_line(prompt), details=details, policy=settings.rules[0])


def save_page(path: str | Path, generation: Generation, tokenizer: Tokenizer, **options: Any) -> Path:
    """Writes the `page`, with its options, atomically and returns its path.

    Raises:
        ValueError: the generation was not recorded, or the file cannot be written.
    """
    text = page(generation, tokenizer, **options)
    check_file(path)
    write_text(path, text)
    return Path(path)


def page(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    title: str = "A decoded text",
    policy: StoppingPolicy | None = None,
    details: Mapping[str, Any] | None = None,
) -> str:
    """The HTML. It has light and dark modes and adapts to the screen's width.

    The model's text is escaped (control characters as on a terminal), and only the page's own script may run.

    Args:
        policy: the one that decided. Its threshold shares an axis with the drafter's largest probability where it is a
            probability, and has an axis of its own in its unit otherwise. With AdaEDL, also wrapped, the chart has the
            bound 1 - sqrt(entropy_factor * entropy), which AdaEDL compares with lambda.
        details: further rows of the table: the prompt, the models, the policy.
    """
    tokens, inner = tokens_of(generation, tokenizer), policy
    while inner is not None and inner.name != "adaedl":
        inner = inner.options.get("policy")
    factor = float(policy.hyperparameters["entropy_factor"]) if policy and inner else None
    rate = generation.statistics["draft_acceptance_rate"]
    accepted = "nothing drafted" if rate is None else f"{rate:.0%} of drafts accepted"
    loader = PackageLoader("specdec_jax.app.views")
    visible: Any = lambda value: shown(value) if type(value) is str else value  # noqa: E731 - not of marked-up text
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=visible)
    names, tips = [token.text or tokenizer.decode([token.id], skip_special=False) for token in tokens], []
    for token, name in zip(tokens, names, strict=True):
        rows = [
            ("token", f"{name.replace(chr(10), '↵')!r} ({token.id})"),
            ("kind", "end of sequence, " * token.ends + KINDS[token.kind]),
            ("entropy H", _figure(token.entropy, " nats")),
            ("max probability", _figure(token.max_prob)),
            ("threshold", _figure(token.threshold)),
            *(("round", f"{token.round + 1}"), ("drafter", f"{token.drafter}"), ("phase", PHASES[min(token.phase, 1)])),
        ]
        rejected = shown("".join(draft.text for draft in token.rejected)).replace("\n", "↵")
        tips.append(rows + [("rejected here", rejected)] * bool(token.rejected))
    figures = [*(details or {}).items(), ("tokens", str(len(tokens)))]
    if generation.seconds > 0:
        figures.append(("tokens/s", f"{len(tokens) / generation.seconds:.1f}"))
    for name, value in generation.statistics.items():
        if isinstance(value, list):
            figure = "  ".join("–" if entry is None else f"{entry:.2f}".removesuffix(".00") for entry in value)
        elif isinstance(value, float):
            figure = f"{value:.3f}"
        else:
            figure = "–" if value is None else str(value)
        figures.append((name.replace("_", " ").replace("num ", ""), figure))
    figures.append(("tokens in reasoning phases", str(sum(token.phase == 1 for token in tokens))))
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        title=title,
        line=f"{len(generation.tokens)} tokens, {accepted}, {ENDS[generation.finish_reason]}",
        tokens=tokens,
        names=names,
        branches=any(token.kind == "branch" for token in tokens),
        phases=phases_of(tokens),
        chart=chart(tokens, factor, getattr(policy and policy.threshold, "unit", "the policy's own unit")),
        factor=factor,
        figures=figures,
        tips=tips,
        style=style,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _figure(value: float, unit: str = "") -> str:
    return f"{value:.3f}{unit}" if math.isfinite(value) else "–"


class _Strip(NamedTuple):
    """A part of the chart with a scale of its own, from 0 to `scale`."""

    begin: int  # pixels from the top
    scale: float
    ticks: int
    unit: str

    def at(self, value: float) -> float:
        """The value's place in pixels from the top."""
        return round(self.begin + STRIP * (1 - value / self.scale), 1)


def chart(tokens: Sequence[Token], entropy_factor: float | None, unit: str) -> dict[str, Any]:
    """The chart's elements for the template: bars, crosses and paths, in pixels from the top left.

    Strips over one axis of tokens: entropy in nats, probabilities, and the threshold in its `unit`, which is in the
    second strip if it is a probability: one scale for two units would compare what cannot be compared.
    """
    top = nice(max((t.entropy for t in tokens if math.isfinite(t.entropy)), default=1.0))
    limits = [t.threshold for t in tokens]
    highest = nice(max((limit for limit in limits if math.isfinite(limit)), default=0.0))
    apart = unit != "probability" and any(map(math.isfinite, limits))
    scales = [(top, TICKS, "nats"), (1.0, 2, "probability"), *([(highest, 2, unit)] if apart else [])]
    strips = [_Strip(TOP + index * (STRIP + GAP), *scale) for index, scale in enumerate(scales)]
    column = max(NARROWEST, min(WIDEST, WIDTH // max(len(tokens), 1)))
    up, down = strips[0].at, strips[1].at
    height = lambda value: max(round(STRIP * value / top, 1), 1.0)  # noqa: E731
    bars = [
        {"kind": t.kind, "x": i * column + 1.5, "y": up(t.entropy), "width": column - 3, "height": height(t.entropy)}
        for i, t in enumerate(tokens)
        if math.isfinite(t.entropy)
    ]
    cross = f"{TOP + STRIP + GAP / 2 - 3.5:g}l7 7m0 -7l-7 7"  # 7 pixels wide, between the strips
    bounds = [bound(t.entropy, entropy_factor) if entropy_factor is not None else math.nan for t in tokens]
    ticks = [(strip, strip.scale * k / strip.ticks) for strip in strips for k in range(strip.ticks + 1)]
    return {
        "left": LEFT,
        "column": column,
        "width": max(len(tokens), 1) * column,
        "height": strips[-1].begin + STRIP + TOP,
        "units": [{"y": strip.begin + STRIP / 2, "label": strip.unit} for strip in strips],
        "apart": apart,
        "ticks": [{"y": strip.at(value), "label": f"{value:g}"} for strip, value in ticks],
        "phases": [{"x": a * column, "width": (b - a) * column} for a, b in phases_of(tokens)],
        "rounds": [i * column for i, token in enumerate(tokens) if token.first and i],
        "bars": bars,
        "crosses": [f"M{(i + 0.5) * column - 3.5:g} {cross}" for i, t in enumerate(tokens) if t.rejected],
        "chance": _steps([t.max_prob for t in tokens], down, column),
        "bound": _steps(bounds, down, column),
        "limit": _steps(limits, strips[-1].at, column),
        "about": f"Above, the drafter's entropy of {len(tokens)} tokens, up to {top:g} nats; below, its largest "
        f"probability and the policy's threshold ({unit}). Every token's own figures are in its tooltip.",
    }


def nice(value: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10 times a power of ten that is at least `value`, for short tick labels."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def _steps(values: Sequence[float], place: Callable[[float], float], column: int) -> str:
    """A path that is constant over each token's column and interrupted at unknown values."""
    path, before = [], False
    for index, value in enumerate(values):
        finite = math.isfinite(value)
        if finite:
            path.append(f"{'L' if before else 'M'}{index * column} {place(value):g}H{(index + 1) * column}")
        before = finite
    return "".join(path)
