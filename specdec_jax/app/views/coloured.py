"""A recorded generation on a terminal: text coloured by kind, with a strip of entropies below."""

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from specdec_jax.app.views.terminal import STYLES, legend, visible
from specdec_jax.app.views.tokens import Token, tokens_of
from specdec_jax.loading import Tokenizer
from specdec_jax.text.generation import Generation
from specdec_jax.text.streaming import Piece

BLOCKS = "▁▂▃▄▅▆▇█"
REASONING = "underline"
BOUNDARY = "▏"  # before the first token of a round
LABELS = 9  # width of the labels left of the strips


def render(
    generation: Generation, tokenizer: Tokenizer, *, show_rejected: bool = True, boundaries: bool = True
) -> RenderableType:
    """The decoded text in the colours of `generate`: rejected drafts struck through, a thin line before each round,
    reasoning phases underlined; then the legend, and per token the drafter's entropy, its largest probability and the
    policy's threshold as blocks.

    Raises:
        ValueError: the generation was not recorded.
    """
    tokens = tokens_of(generation, tokenizer)
    text = Text()
    for token in tokens:
        phase = f" {REASONING}" if token.phase else ""
        if boundaries and token.first and token.round:
            text.append(BOUNDARY, "dim")
        if show_rejected:
            for draft in token.rejected:
                text.append(visible(Piece(draft.text, "rejected")), STYLES["rejected"])
        text.append(visible(Piece(token.text, token.kind)), STYLES[token.kind] + phase)
    marks = [legend(show_rejected, any(token.kind == "branch" for token in tokens))]
    if boundaries:
        marks.append(Text(f"{BOUNDARY} a round begins", "dim"))
    if any(token.phase for token in tokens):
        marks.append(Text("reasoning phase", REASONING))
    return Group(text, Text(), Text("   ").join(marks), Text(), Strips(tokens))


class Strips:
    """One column per token, in lines as wide as the console: entropy H, largest probability, the policy's threshold."""

    def __init__(self, tokens: Sequence[Token]):
        self._tokens = tokens
        self._highest = max((t.entropy for t in tokens if math.isfinite(t.entropy)), default=0.0)
        limits = [t.threshold for t in tokens if math.isfinite(t.threshold)]
        self._limit = max([1.0, *limits])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - LABELS, 1)
        for begin in range(0, len(self._tokens), width):
            part = self._tokens[begin : begin + width]
            yield self._line("H", [(t.entropy, self._highest) for t in part], part)
            yield self._line("max prob", [(t.max_prob, 1.0) for t in part], part)
            if any(math.isfinite(t.threshold) for t in part):
                yield self._line("lambda", [(t.threshold, self._limit) for t in part], part)
        if self._tokens:
            highest = f"{self._highest:.2f} nats" if self._highest else "unknown"
            yield Text(f"{'':{LABELS}}full blocks: H {highest}, max prob 1, lambda {self._limit:g}", "dim")

    def _line(self, label: str, values: Sequence[tuple[float, float]], tokens: Sequence[Token]) -> Text:
        line = Text(no_wrap=True)
        line.append(f"{label:{LABELS}}", "dim")
        for (value, top), token in zip(values, tokens, strict=True):
            style = STYLES["rejected"].replace("strike ", "") if token.rejected else STYLES[token.kind]
            line.append(block(value, top), style + (f" {REASONING}" if token.phase else ""))
        return line


def block(value: float, top: float) -> str:
    """A block with the height of `value` between 0 and `top`; a dot if it is unknown."""
    if not math.isfinite(value):
        return "·"
    share = min(max(value / top, 0.0), 1.0) if top else 0.0
    return BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)]
