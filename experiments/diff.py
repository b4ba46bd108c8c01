"""Two run folders side by side: what was told, where it ran, and which numbers came out differently.

Question:  Do two runs agree, and if not, which config field, version or device could be why?
Command:   python -m experiments.diff A/ B/ [--tolerance 0.05] [--ignore seconds ...] [--most 0] [--keys prompt_id ...]
Time:      seconds
Output:    three tables: the setup where it differs, every number's mean in both, and the results that changed most
           (--most 0: all). Exit status 0 if the results agree, 1 if not, 2 on bad input; the setup does not count.

Rows of results.jsonl are matched by the keys that identify them (--keys, or those that `identify` finds). A number
differs when it changes by more than --tolerance of the larger of the two; everything else must be equal.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from experiments.lib.cells import NONE, terminal_table
from experiments.lib.commands import exit_codes, terminal, told
from experiments.lib.run_folder import read_manifest, read_rows
from experiments.lib.run_matching import MISSING, Matched, flatten, identify, match

NO_SETUP = ("started", "command", "compile_seconds", "config.out")  # differ between any two runs
WIDEST = 60  # characters of a value or a row's name in a table


@dataclass(frozen=True)
class Diff:
    """Compare two run folders."""

    a: tyro.conf.Positional[Path]
    """A run folder."""
    b: tyro.conf.Positional[Path]
    """Another; ratios are B over A."""
    tolerance: float = 0.0
    """Largest relative change of a number that still counts as equal."""
    ignore: tuple[str, ...] = ()
    """Fields of the results left out, with what is in them."""
    keys: tuple[str, ...] = ()
    """Fields that identify a row; none: found out."""
    most: int = 20
    """Most changed results to list; 0: all."""


@dataclass(frozen=True)
class Change:
    """A field of a matched row, in both folders. MISSING where a row has no such field."""

    row: str
    field: str
    a: Any
    b: Any

    @property
    def size(self) -> float:
        """Relative change, from 0 to 2; infinite if it is no number."""
        return relative_change(self.a, self.b)


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 0 if the results agree, 1 if they differ, 2 on bad input."""
    return diff(told(Diff, __doc__, arguments), terminal())


def diff(config: Diff, console: Console) -> int:
    """Compares and prints; 0 or 1 as `main`.

    Raises:
        ValueError, FileNotFoundError: a folder is none of a run, a key is not in every row, or a number out of range.
    """
    if not 0 <= config.tolerance < math.inf or config.most < 0:
        name = "most" if config.most < 0 else "tolerance"
        raise ValueError(f"{name} must be a number of 0 or more, got {getattr(config, name)}")
    setups = [read_manifest(folder) for folder in (config.a, config.b)]
    rows = [read_rows(folder) for folder in (config.a, config.b)]
    for folder, found in zip((config.a, config.b), rows, strict=True):
        if not found:
            raise ValueError(f"{str(folder)!r} has no results to compare")
    keys = tuple(config.keys) or identify(rows[0], rows[1])
    matched = match(rows[0], rows[1], keys)
    compared = compare_rows(matched, keys, config.ignore)
    changed = [change for change in compared if change.size > config.tolerance]
    console.print(f"A: {config.a}\nB: {config.b}\n", soft_wrap=True)
    _print_setup(setup_changes(*setups), console)
    _print_numbers(compared, config.tolerance, console)
    _print_largest(changed, config.most, console)
    _print_alone("A", matched.only_a, config.most, console)
    _print_alone("B", matched.only_b, config.most, console)
    agree = not (changed or matched.only_a or matched.only_b)
    conclusion = "The results agree" if agree else f"{len(changed)} of {len(compared)} values differ"
    by = ", ".join(keys) or "their order"
    console.print(f"{conclusion} (tolerance {config.tolerance:g}; {len(matched.pairs)} rows matched by {by}).")
    return 0 if agree else 1


def setup_changes(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields of two manifests that differ, with their values: `config.methods[adaedl].policy.options.raw_entropy`."""
    flat = [flatten(entry) for entry in (a, b)]
    every = dict.fromkeys([*flat[0], *flat[1]])
    names = [name for name in every if not any(f"{name}.".startswith(f"{left_out}.") for left_out in NO_SETUP)]
    both = [(name, flat[0].get(name, MISSING), flat[1].get(name, MISSING)) for name in names]
    nothing = ({}, MISSING)  # an empty object says no more than none
    return [(name, a, b) for name, a, b in both if not _same(a, b) and not (a in nothing and b in nothing)]


def compare_rows(matched: Matched, keys: Sequence[str], ignore: Sequence[str] = ()) -> list[Change]:
    """Every field of every matched pair but the keys, the config's hash and what `ignore` names, equal or not."""
    out = {*keys, *ignore, "config_hash"}
    changes = []
    for name, a, b in matched.pairs:
        one, two = (flatten({key: value for key, value in row.items() if key not in out}) for row in (a, b))
        fields = [field for field in dict.fromkeys([*one, *two]) if field not in out]
        changes += [Change(name, field, one.get(field, MISSING), two.get(field, MISSING)) for field in fields]
    return changes


def relative_change(a: Any, b: Any) -> float:
    """|b - a| over the larger magnitude; 0 for equal values, infinite if they differ and are not both numbers.

    Of lists of fractions of one length it is the largest of their entries'. Lists of whole numbers, which may be token
    ids, are equal or not.
    """
    if _is_number(a) and _is_number(b):
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0
        finite = math.isfinite(a) and math.isfinite(b)
        return abs(b - a) / max(abs(a), abs(b)) if finite else math.inf
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(n, float) for n in a + b):
        return max(relative_change(one, two) for one, two in zip(a, b, strict=True))
    return 0.0 if _same(a, b) else math.inf


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _print_setup(changes: Sequence[tuple[str, Any, Any]], console: Console) -> None:
    if not changes:
        console.print("Config, versions, devices and revision are the same.\n")
        return
    table = terminal_table("Setup: what differs", ("field", "A", "B"), left=3, overflow="fold")
    for field, a, b in changes:
        table.add_row(field, _text(a), _text(b))
    console.print(table, "")


def _print_numbers(compared: Sequence[Change], tolerance: float, console: Console) -> None:
    table = terminal_table(
        "Results: means over the matched rows", ("number", "rows", "differ", "A", "B", "B/A"), left=1, overflow="fold"
    )
    for field in dict.fromkeys(change.field for change in compared):
        of_field = [c for c in compared if c.field == field]
        numbers = [c for c in of_field if _is_number(c.a) and _is_number(c.b)]
        differ = sum(c.size > tolerance for c in of_field)
        if numbers:
            a, b = (sum(values) / len(numbers) for values in zip(*((c.a, c.b) for c in numbers), strict=True))
            cells = (_text(a), _text(b), _ratio(a, b))
        elif differ:
            cells = ("", "", "")
        else:
            continue  # text and lists that agree have nothing to show
        table.add_row(field, str(len(of_field)), str(differ), *cells)
    console.print(table, "")


def _print_largest(changed: Sequence[Change], most: int, console: Console) -> None:
    if not changed:
        return
    shown = sorted(changed, key=lambda change: -change.size)[: most or None]
    title = f"Largest changes: {len(shown)} of {len(changed)}"
    table = terminal_table(title, ("row", "field", "A", "B", "B/A"), left=2, overflow="fold")
    for change in shown:
        table.add_row(change.row, change.field, _text(change.a), _text(change.b), _ratio(change.a, change.b))
    console.print(table, "")


def _print_alone(name: str, rows: Sequence[str], most: int, console: Console) -> None:
    if rows:
        shown = [*rows[: most or None], *(["..."] if 0 < most < len(rows) else [])]
        console.print(f"Only in {name}, {len(rows)} rows: " + "; ".join(shown) + "\n")


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _ratio(a: Any, b: Any) -> str:
    return f"{b / a:.3f}" if _is_number(a) and _is_number(b) and a else NONE


if __name__ == "__main__":
    sys.exit(main())
