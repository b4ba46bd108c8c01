"""Coordinates of the page's chart: two strips over one axis of tokens. Entropy is in nats and the thresholds of AdaEDL
and the confidence rules are in [0, 1], so one scale for both would compare what cannot be compared."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax.app.views.tokens import Token, bound, phases_of

LEFT, STRIP, GAP, TOP = 44, 110, 26, 10  # pixels
WIDTH, NARROWEST, WIDEST = 900, 10, 22  # width of the chart, and range of a token's column
TICKS = 4


def chart(tokens: Sequence[Token], entropy_factor: float | None) -> dict[str, Any]:
    """The elements for the template: bars, crosses and paths, in pixels from the top left."""
    top = nice(max((t.entropy for t in tokens if math.isfinite(t.entropy)), default=1.0))
    highest = max([1.0, *(t.threshold for t in tokens if math.isfinite(t.threshold))])
    column = max(NARROWEST, min(WIDEST, WIDTH // max(len(tokens), 1)))
    lower = TOP + STRIP + GAP  # top of the second strip
    up = lambda value: round(TOP + STRIP * (1 - value / top), 1)  # noqa: E731
    down = lambda value: round(lower + STRIP * (1 - value / highest), 1)  # noqa: E731
    bars = [
        {"kind": t.kind, "x": i * column + 1.5, "y": up(t.entropy), "width": column - 3, "height": _height(t, top)}
        for i, t in enumerate(tokens)
        if math.isfinite(t.entropy)
    ]
    bounds = [bound(t.entropy, entropy_factor) if entropy_factor is not None else math.nan for t in tokens]
    ticks = [{"y": up(top * k / TICKS), "label": f"{top * k / TICKS:g}"} for k in range(TICKS + 1)]
    ticks += [{"y": down(highest * k / 2), "label": f"{highest * k / 2:.3g}"} for k in range(3)]
    return {
        "left": LEFT,
        "column": column,
        "width": max(len(tokens), 1) * column,
        "height": lower + STRIP + TOP,
        "ticks": ticks,
        "phases": [{"x": a * column, "width": (b - a) * column} for a, b in phases_of(tokens)],
        "rounds": [i * column for i, token in enumerate(tokens) if token.first and i],
        "bars": bars,
        "crosses": [_cross((i + 0.5) * column, TOP + STRIP + GAP / 2) for i, t in enumerate(tokens) if t.rejected],
        "chance": _steps([t.max_prob for t in tokens], down, column),
        "bound": _steps(bounds, down, column),
        "limit": _steps([t.threshold for t in tokens], down, column),
        "about": f"Above, the drafter's entropy of {len(tokens)} tokens, up to {top:g} nats; below, its largest "
        "probability and the policy's threshold. Every token's own figures are in its tooltip.",
    }


def nice(value: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10 times a power of ten that is at least `value`, for short tick labels."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def _height(token: Token, top: float) -> float:
    return max(round(STRIP * token.entropy / top, 1), 1.0)


def _cross(x: float, y: float, size: float = 3.5) -> str:
    return f"M{x - size:g} {y - size:g}l{2 * size:g} {2 * size:g}m0 {-2 * size:g}l{-2 * size:g} {2 * size:g}"


def _steps(values: Sequence[float], place: Callable[[float], float], column: int) -> str:
    """A path that is constant over each token's column and interrupted at unknown values."""
    path, before = [], False
    for index, value in enumerate(values):
        finite = math.isfinite(value)
        if finite:
            path.append(f"{'L' if before else 'M'}{index * column} {place(value):g}H{(index + 1) * column}")
        before = finite
    return "".join(path)
