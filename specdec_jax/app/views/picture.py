"""A recorded generation as a picture: entropy, threshold, accepted and rejected drafts, phases."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec_jax.app.views.tokens import Token, bound, phases_of, tokens_of
from specdec_jax.app.views.writable import check_file
from specdec_jax.loading import Tokenizer
from specdec_jax.loading.new_folder import replacing
from specdec_jax.text.generation import Generation

SUFFIXES = (".png", ".svg", ".pdf")
# Of Okabe and Ito's palette, told apart with any colour vision.
COLOURS = {"accepted": "#009E73", "recovered": "#E69F00", "bonus": "#0072B2"}
REJECTED, LIMIT, SHADE, INK = "#D55E00", "#CC79A7", "#F3E9C6", "#222222"
NAMED = 100  # most tokens whose text is written under the axis


def save_picture(
    path: str | Path,
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    title: str = "",
    entropy_factor: float | None = None,
) -> Path:
    """Writes the picture as PNG, SVG or PDF, whole or not at all, and returns its path.

    Args:
        entropy_factor: as of `save_page`.

    Raises:
        ValueError: the generation was not recorded, another suffix, or the file cannot be written.
    """
    check_file(path, SUFFIXES)
    drawn = figure(generation, tokenizer, title=title, entropy_factor=entropy_factor)
    with replacing(Path(path).expanduser()) as temporary:
        drawn.savefig(temporary)
    return Path(path)


def figure(
    generation: Generation, tokenizer: Tokenizer, *, title: str = "", entropy_factor: float | None = None
) -> Figure:
    """Above, the drafter's entropy in nats per token with a cross where drafts were rejected; below, its largest
    probability, AdaEDL's bound if its factor is given, and the policy's threshold. No pyplot state.
    """
    tokens = tokens_of(generation, tokenizer)
    drawn = Figure(figsize=(min(max(7.0, 0.13 * len(tokens)), 24.0), 4.8), dpi=150, layout="constrained")
    upper, lower = drawn.subplots(2, 1, sharex=True)
    for axes in (upper, lower):
        for number, (begin, end) in enumerate(phases_of(tokens)):
            label = "_" if number or axes is lower else "reasoning phase"
            axes.axvspan(begin - 0.5, end - 0.5, color=SHADE, zorder=0, label=label)
        axes.spines[["top", "right"]].set_visible(False)
    _entropies(upper, tokens)
    _thresholds(lower, tokens, entropy_factor)
    if len(tokens) <= NAMED:
        names = [token.text.replace("\n", "↵") or ("■" if token.ends else "·") for token in tokens]
        lower.set_xticks(range(len(tokens)), names, rotation=90, fontsize=6, parse_math=False)
    else:
        lower.set_xlabel("token")
    lower.set_xlim(-0.75, max(len(tokens), 1) - 0.25)
    drawn.suptitle(title, fontsize=11, parse_math=False)
    return drawn


def _entropies(axes: Axes, tokens: Sequence[Token]) -> None:
    for kind, colour in COLOURS.items():
        places = [i for i, token in enumerate(tokens) if token.kind == kind]
        if places:
            axes.bar(places, [tokens[i].entropy for i in places], width=0.75, color=colour, label=kind)
    crossed = [i for i, token in enumerate(tokens) if token.rejected]
    if crossed:
        # Under the axis, so that a tall bar does not hide them.
        transform = axes.get_xaxis_transform()
        style = {"color": REJECTED, "marker": "x", "s": 18, "linewidths": 1.4, "label": "drafts rejected"}
        axes.scatter(crossed, np.full(len(crossed), -0.04), transform=transform, clip_on=False, **style)
    axes.set_ylabel("drafter's entropy, nats", fontsize=9)
    _key(axes)


def _thresholds(axes: Axes, tokens: Sequence[Token], entropy_factor: float | None) -> None:
    places = np.arange(len(tokens))
    axes.step(places, [t.max_prob for t in tokens], where="mid", color="#888888", lw=0.9, label="largest probability")
    if entropy_factor is not None:
        bounds = [bound(token.entropy, entropy_factor) for token in tokens]
        label = f"1 - sqrt({entropy_factor:g} H)"
        axes.step(places, bounds, where="mid", color=COLOURS["bonus"], lw=1.3, label=label)
    limits = [token.threshold for token in tokens]
    if np.any(np.isfinite(limits)):
        axes.step(places, limits, where="mid", color=LIMIT, lw=2.0, label="threshold of the round (lambda)")
    axes.set_ylim(bottom=0)
    _key(axes)


def _key(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        style = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "labelcolor": INK}
        axes.legend(ncols=5, fontsize=7, borderaxespad=0.1, **style)
