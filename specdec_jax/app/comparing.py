"""Timing of a request by several methods with the same seed, alternating: plain decoding and policies."""

from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from specdec_jax.text.generation import Generation, Pair, Request, build_pair, decode

REPEATS = 2  # repeats, alternating between methods, so that slow moments of the machine affect all of them


class Compared(NamedTuple):
    """One method over its repeats; the tokens are the same in each."""

    name: str
    result: Generation
    tokens_per_second: float  # total tokens over total seconds, without prefill and compilation
    identical: bool  # whether the tokens equal those of plain decoding


def against_plain(pair: Pair, request: Request) -> str:
    """A sentence about the measured speed-up of a request over plain decoding."""
    rules = "policy", "verifier", "monitor"  # not for plain decoding
    options = {name: value for name, value in request.options.items() if not name.startswith(rules)}
    plainly = "plain", build_pair(pair.target, None), request._replace(options=options)
    plain, drafted = measure([plainly, ("drafted", pair, request)])
    speeds = f"{drafted.tokens_per_second:.1f} against {plain.tokens_per_second:.1f} tokens/s"
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    return f"[measured: {ratio:.2f} times plain decoding, {speeds}, {REPEATS} times each in turn]"


def measure(methods: list[tuple[str, Pair, Request]]) -> list[Compared]:
    """Times the methods alternately, after compilation; their texts are compared with the first one's."""
    decoded = [[decode(pair, request).results[0] for _, pair, request in methods] for _ in range(REPEATS)]
    plain = decoded[0][0].tokens
    rows = []
    for (name, _, _), results in zip(methods, zip(*decoded, strict=True), strict=True):
        seconds = sum(result.seconds for result in results)
        speed = sum(len(result.tokens) for result in results) / max(seconds, 1e-9)
        rows.append(Compared(name, results[0], speed, results[0].tokens == plain))
    return rows


def table(rows: list[Compared], temperature: float, lossless: bool = True) -> Table:
    """A table for a terminal, with a note on why sampled texts differ."""
    grid = Table(title="The last prompt, again", title_style="bold", caption_justify="left")
    if not lossless:
        grid.caption = "The verifier is lossy, so its texts may differ from the target's."
    elif temperature > 0:
        grid.caption = "Sampled: the same distribution from other draws, so the texts differ."
    elif not all(row.identical for row in rows):
        grid.caption = "A text that differs: a near tie of the target's, in the arithmetic of another width."
    for column in ("method", "tokens", "tokens/s", "against plain", "accepted", "mean draft", "passes", "text"):
        grid.add_column(column, justify="left" if column in ("method", "text") else "right")
    for row in rows:
        figures = row.result.statistics
        rate, mean = figures["draft_acceptance_rate"], figures["mean_draft_length"]
        cells: list[Any] = [Text(row.name), str(len(row.result.tokens)), f"{row.tokens_per_second:.1f}"]
        cells += [f"{row.tokens_per_second / rows[0].tokens_per_second:.2f}x"]
        cells += ["-" if rate is None else f"{rate:.0%}", "-" if mean is None else f"{mean:.2f}"]
        grid.add_row(*cells, str(figures["num_rounds"]), "identical" if row.identical else "differs")
    return grid
