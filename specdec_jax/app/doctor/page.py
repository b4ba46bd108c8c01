"""The page of the `doctor` command, section by section: what is measured and what is predicted, each called so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.app.doctor.conclusion import Conclusion
from specdec_jax.app.doctor.memory import MOST_ROWS, Bytes, Caches, Weights, size
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.intervals import Interval
from specdec_jax.metrics.predicted import Predicted

NONE, BEST = "–", "*"
SHOWN_DRAFTS = 8  # of the acceptance by draft: what fits into 80 columns


def show_pair(
    console: Console, target: Mapping[str, Any], drafter: Mapping[str, Any], agreements: Sequence[str]
) -> None:
    """Who the two are, and what they agree on."""
    table = _table("", "target", "drafter")
    for name in target:
        cells = (f"{side[name]:,}" if isinstance(side[name], int) else str(side[name]) for side in (target, drafter))
        table.add_row(name, *cells)
    _heading(console, "The pair")
    console.print(table)
    for sentence in agreements:
        console.print(sentence)


def show_memory(console: Console, weights: Weights, caches: Caches | None) -> None:
    """What they take of each device; None: they were not loaded."""
    table = _table("", "target", "drafter", "both")

    def add(name: str, taken: Bytes) -> None:
        table.add_row(name, size(taken.target), size(taken.drafter), size(taken.both))

    for dtype, taken in weights.by_dtype.items():
        add(f"weights in {dtype}, predicted", taken)
    if caches is not None:
        add(f"weights loaded in {caches.dtype}, measured", caches.weights)
        table.add_row(f"caches of a row of {caches.context:,} tokens, predicted", "", "", size(caches.row))
    _heading(console, "Memory", f" on each of {weights.devices} devices" if weights.devices > 1 else "")
    console.print(table)
    console.print(_free(weights, caches))


def show_costs(console: Console, found: CostModel, how: str) -> None:
    """What passes take. `how` that is known: measured, given or predicted."""
    _heading(console, f"Costs, {how}", f": {found.device}" if found.device else "")
    if how == "predicted":
        console.print(f"A drafter step, by the bytes both models read: c = {found.ratio:.3f} passes of plain decoding.")
        console.print("Verifying drafts is taken to cost no more than such a pass.")
        return
    table = _table("tokens verified in a pass", *map(str, found.widths))
    table.add_row("ms", *(f"{1e3 * time:.1f}" for time in found.target_pass))
    table.add_row("V, in passes of plain decoding", *(f"{time / found.plain_pass:.2f}" for time in found.target_pass))
    console.print(table)
    plain, step = f"{1e3 * found.plain_pass:.1f} ms", f"{1e3 * found.drafter_step:.2f} ms"
    console.print(f"A pass of plain decoding takes {plain}, a drafter step {step}: c = {found.ratio:.3f}.")
    if found.doubts:
        console.print(Text(f"Doubtful, measured on a busy machine: {'; '.join(found.doubts)}.", "yellow"))


def show_acceptance(console: Console, found: Sequence[Interval], texts: int, tokens: int, temperature: float) -> None:
    """Of every draft of a round."""
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    _heading(console, "Acceptance, measured", f": {texts} answers of the target, {tokens} tokens, {how}")
    shown = found[:SHOWN_DRAFTS]
    table = _table("draft of a round", *map(str, range(1, len(shown) + 1)))
    table.add_row("accepted, if reached", *(f"{one.estimate:.2f}" for one in shown))
    table.add_row("95 %, from", *(_number(one.low) for one in shown))
    table.add_row("to", *(_number(one.high) for one in shown))
    console.print(table)


def show_shared(console: Console, probability: float, *, replayed: bool) -> None:
    """What the tokens that both have cover. `replayed`: a drafter that drafts those, and not text that is no trace."""
    console.print(f"The tokens that both have hold {probability:.1%} of the target's probability along a sample text.")
    if not replayed:
        console.print("These are what is replayed; text that is tokenised again is measured by generate --compare.")


def show_rules(console: Console, found: Sequence[Predicted], fast: Sequence[bool]) -> None:
    """All rules, the fastest first: a line each, of static lengths the best and one of all.

    `fast`: whether each is as fast as the best.
    """
    static = [one for one in found if one.policy.name == "static"]
    best = max(static, key=_speedup)
    table = _table("rule", "speed-up", "95 %", "tokens", "drafted", "accepted")
    for one, marked in sorted(zip(found, fast, strict=True), key=lambda both: -_speedup(both[0])):
        if one.policy.name != "static" or one is best:
            mark, style = (BEST, "bold") if marked else (" ", "")
            counts = f"{one.tokens:.2f}", f"{one.drafted:.2f}", _number(one.acceptance_rate)
            table.add_row(Text(f"{mark} {one.policy!r}", style), f"{_speedup(one):.2f}", _bounds(one.speedup), *counts)
    _heading(console, "Speed-up over plain decoding, predicted", ": every rule replayed along these answers")
    console.print(table)
    lengths = ", ".join(f"{_speedup(one):.2f}" for one in static)
    console.print(f"Static lengths of 1 to {len(static)}: {lengths}.")
    console.print(f"{BEST} as fast as the best, as far as these answers tell. Tokens, drafted: a round.")


def show_conclusion(console: Console, found: Conclusion) -> None:
    """The last lines."""
    console.print()
    said = found.why if found.works else f"This pair does not work here: {found.why}."
    console.print(Text(said, "bold green" if found.pays else "bold red"))
    if found.command is not None:
        console.print(Text(found.command), soft_wrap=True)


def _free(weights: Weights, caches: Caches | None) -> str:
    """How much of a device is free, and how many rows that makes."""
    free, when = (weights.free, "before") if caches is None else (caches.free, "after")
    if free is None:
        return "The device does not say how much is free."
    rows = ""
    if caches is not None and caches.rows:
        more = " or more" if caches.rows == MOST_ROWS else ""
        rows = f"; {caches.rows}{more} such rows fit, predicted"
    return f"{size(free)} free {when} loading, measured{rows}."


def _speedup(one: Predicted) -> float:
    return one.speedup.estimate


def _bounds(value: Interval) -> str:
    return NONE if math.isnan(value.low) else f"{value.low:.2f}–{value.high:.2f}"


def _number(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.2f}"


def _heading(console: Console, title: str, about: str = "") -> None:
    console.print()
    console.print(Text(title, "bold").append(about, "not bold"))


def _table(first: str, *heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table
