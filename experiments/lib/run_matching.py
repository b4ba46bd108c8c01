"""Rows of two runs matched by what identifies them, for `experiments.diff`."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MEASURED = ("num_", "mean_", "total_")  # beginnings of fields that a run counts or measures
MEASURED_ENDS = ("_passes", "_seconds", "_rate", "_share", "_reason")
OUTCOMES = ("seconds", "text", "equals_plain", "config_hash")
Row = Mapping[str, Any]


class _Missing:
    def __repr__(self) -> str:
        return "(none)"


MISSING: Any = _Missing()
"""Stands for a field that one of the two does not have."""


class Matched(NamedTuple):
    """Rows of A and B of one identity, with its text, and the identities that only one of them has."""

    pairs: list[tuple[str, Row, Row]]
    only_a: list[str]
    only_b: list[str]


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Objects as dotted names. Lists of objects that all have a different `name` go by it, other lists stay whole."""
    if isinstance(value, Mapping) and value:
        parts = [flatten(entry, f"{name}.{key}" if name else str(key)) for key, entry in value.items()]
        return {key: entry for part in parts for key, entry in part.items()}
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) and "name" in entry for entry in value):
        names = [str(entry["name"]) for entry in value]
        if len(set(names)) == len(names):
            return flatten({f"{name}[{entry['name']}]": entry for entry in value})
    return {name: value}


def identify(a: Sequence[Row], b: Sequence[Row]) -> tuple[str, ...]:
    """The fields that say which row is which, in the rows' order, taken from those that every row of both has.

    Every text that is no result by its name; then, as long as rows of one run are alike in all of them, what tells some
    apart and has no other values in one run than in both: a repeat, a seed, a temperature, a sweep's number. Measured
    numbers fail that. Rows that are alike even so are told apart by their order.
    """
    common = [key for key in a[0] if all(key in row for row in (*a, *b)) and not _is_outcome(key)]
    keys = [key for key in common if all(isinstance(row[key], str) for row in (*a, *b))]
    for key in common:
        alike = _alike(a, keys) + _alike(b, keys)
        if not alike:
            break
        one, two = ({_canonical(row[key]) for row in rows} for rows in (a, b))
        if key not in keys and (one <= two or two <= one) and _alike(a, [*keys, key]) + _alike(b, [*keys, key]) < alike:
            keys.append(key)
    return tuple(key for key in common if key in keys)


def match(a: Sequence[Row], b: Sequence[Row], keys: Sequence[str]) -> Matched:
    """Pairs the rows of equal keys; the n-th of several alike with the n-th of the other's.

    Raises:
        ValueError: a row lacks a key.
    """
    one, two = _by_identity(a, keys), _by_identity(b, keys)
    return Matched(
        pairs=[(_name(*key), row, two[key]) for key, row in one.items() if key in two],
        only_a=[_name(*key) for key in one if key not in two],
        only_b=[_name(*key) for key in two if key not in one],
    )


def _by_identity(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[tuple[str, ...], int], Row]:
    seen: Counter[tuple[str, ...]] = Counter()
    found = {}
    for row in rows:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ValueError(f"a row has no {missing[0]!r} to be matched by (it has: {', '.join(row)})")
        values = tuple(_canonical(row[key]) for key in keys)
        seen[values] += 1
        found[values, seen[values]] = row
    return found


def _name(values: tuple[str, ...], number: int) -> str:
    text = ", ".join(values) or "row"
    return f"{text} ({number})" if number > 1 or not values else text


def _is_outcome(key: str) -> bool:
    return key in OUTCOMES or key.startswith(MEASURED) or key.endswith(MEASURED_ENDS)


def _alike(rows: Sequence[Row], keys: Sequence[str]) -> int:
    """Rows that an earlier one is alike to in all keys."""
    return len(rows) - len({tuple(_canonical(row[key]) for key in keys) for row in rows})


def _canonical(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
