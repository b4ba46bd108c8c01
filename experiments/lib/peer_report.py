"""The table of `python -m experiments.peers`."""

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

from experiments.lib.cells import PARENTHESES, at_temperature, interval, markdown
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import summary

HEADS = [
    "contender", "dtype", "tokens/s", "over its plain", "specdec_jax over it", "passes per token", "agreement",
    "peak memory, MB", "over weights",
]  # fmt: skip
OURS = "specdec_jax plain", "specdec_jax survival"  # what contenders are compared with


def report(
    config: Any,
    rows: Sequence[Mapping[str, Any]],
    wanted: Sequence[Any],
    failed: Mapping[str, str],
    sizes: Sequence[int],
) -> str:
    """A table a temperature: everyone's speed, and medians (quartiles) over prompts of ratios of neighbours in time."""
    megabytes = [f"{size / 1e6:.0f}" for size in sizes]
    parts = [
        f"{config.target} and {config.drafter} on {device()}, {config.max_new_tokens} tokens a generation, with the "
        f"prompt's time; medians (quartiles) over prompts. Weights: {' and '.join(megabytes)} MB in {config.dtype}. "
        "*specdec_jax over it*: plain decoding over plain decoding, `survival` over all others. *Agreement*: the share "
        "of plain decoding's greedy text before the first difference. *Over weights*: peak memory, less that of the "
        "process before it loaded models, over the weights that the process holds."
    ]
    for temperature in config.temperatures:
        here = [row for row in rows if row["temperature"] == temperature]
        lines = [_line(contender, here, failed, sizes, config.dtype) for contender in wanted]
        parts += [f"**{at_temperature(temperature)}**", markdown(HEADS, lines)]
    return "\n\n".join(parts) + "\n"


def _line(
    contender: Any, rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str], sizes: Sequence[int], dtype: str
) -> list[str]:
    mine = by_prompt(rows, contender.name, contender.dtype)
    if not mine:
        why = failed.get(f"{contender.name}, {contender.dtype}", "not run")
        return [contender.name, contender.dtype, why.replace("|", "/"), *["–"] * (len(HEADS) - 3)]
    plain = by_prompt(rows, f"{contender.peer} plain", contender.dtype)
    ours = by_prompt(rows, OURS[contender.mode != "plain"], dtype)
    reference = by_prompt(rows, OURS[0], dtype)
    speeds = summary([_speed(row) for row in mine.values()])
    peak, base = (max(row[name] for row in mine.values()) / 1e3 for name in ("peak_kb", "base_kb"))
    models = 1 if contender.mode == "plain" and contender.peer != "transformers" else 2
    held = sum(sizes[:models]) / 1e6 * (1 + (contender.dtype != dtype))
    passes = np.mean([row["passes"] / row["num_emitted_tokens"] for row in mine.values()])
    greedy = all(row["temperature"] == 0 for row in mine.values())
    shares = [agreement(row["text"], reference[prompt]["text"]) for prompt, row in mine.items() if prompt in reference]
    ended = failed.get(f"{contender.name}, {contender.dtype}")
    return [
        contender.name + (f" (then: {ended})" if ended else ""),
        contender.dtype,
        interval(speeds, ".1f", PARENTHESES),
        _ratio(mine, plain),
        _ratio(ours, mine),
        f"{passes:.2f}",
        f"{np.mean(shares):.0%}" if greedy and shares else "–",
        f"{peak:.0f}",
        f"{(peak - base) / held:.1f}",
    ]


def by_prompt(rows: Sequence[Mapping[str, Any]], name: str, dtype: str) -> dict[str, Mapping[str, Any]]:
    """A contender's rows."""
    return {row["prompt_id"]: row for row in rows if row["name"] == name and row["dtype"] == dtype}


def agreement(text: str, reference: str) -> float:
    """The share of the reference before the first difference."""
    reference = reference.strip()
    return len(commonprefix([text.strip(), reference])) / max(len(reference), 1)


def _speed(row: Mapping[str, Any]) -> float:
    return row["num_emitted_tokens"] / row["seconds"]


def _ratio(rows: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> str:
    both = [_speed(rows[prompt]) / _speed(other[prompt]) for prompt in rows if prompt in other]
    return interval(summary(both), bounds=PARENTHESES) if both else "–"
