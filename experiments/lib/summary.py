"""From rows (a prompt, a method, a temperature) to one line a method and temperature: what tables and pictures show."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specdec_jax.costs.cost_model import agree
from specdec_jax.metrics.intervals import Interval, Spread, spread, total_speedup

CLEAN_SHARE = 0.05
"""A prompt counts as free of repeated text when at most this share of its tokens, the baseline's too, is repeated."""

COUNTS = (
    "num_emitted_tokens",
    "num_rounds",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "drafter_passes",
    "discarded_passes",
)


Totals = dict[str, dict[str, Any]]  # sums over repeats, by prompt


class MethodSummary(NamedTuple):
    """One method at one temperature, over all prompts. None: does not apply (plain decoding drafts nothing)."""

    method: str
    temperature: float
    prompts: int
    tokens_per_second_mean: float  # mean of the prompts' tokens/s, as Spec-Bench has it
    tokens_per_second_total: float  # all tokens over all seconds
    speedups: list[float]  # ratios to the baseline, in the prompts' order
    speedup: Spread  # of these
    speedup_total: Interval  # total tokens/s over the baseline's
    speedup_clean: Spread | None  # `speedup` over prompts free of repeated text; None if there are none
    repeated_share: float  # of all tokens
    draft_acceptance_rate: float | None  # accepted / drafted tokens
    mean_draft_length: float | None  # drafted tokens / drafts
    mean_acceptance_length: float | None  # 1 + accepted / drafts
    discarded_fraction: float | None  # drafter passes whose distribution gave no token
    equal: tuple[int, int] | None  # outputs equal to plain decoding, outputs compared


def summarise(rows: Iterable[Mapping[str, Any]], baseline: str | None = None) -> list[MethodSummary]:
    """One summary a temperature and method, in the rows' order. `baseline` is the first row's method unless named.

    Repeats of a prompt (rows alike in prompt, method and temperature) are added up: tokens over seconds of all of them.

    Raises:
        ValueError: no rows, a key is missing, or a prompt of a method has no row of the baseline.
    """
    groups: dict[tuple[float, str], Totals] = {}
    for row in rows:
        baseline = baseline or row["method"]
        prompts = groups.setdefault((row["temperature"], row["method"]), {})
        total = prompts.setdefault(str(row["prompt_id"]), {})
        try:
            for name in (*COUNTS, "seconds"):
                total[name] = total.get(name, 0) + row[name]
            total["repeated"] = total.get("repeated", 0.0) + row["repeated_share"] * row["num_emitted_tokens"]
            if row["equals_plain"] is not None:
                total["equal"] = total.get("equal", True) and row["equals_plain"]
        except KeyError as error:
            raise ValueError(f"the result of prompt {row.get('prompt_id')!r} has no {error}") from None
    if not groups:
        raise ValueError("no results to summarise")
    summaries = []
    for temperature, method in sorted(groups, key=lambda key: key[0]):  # stable: methods keep the rows' order
        prompts, plain = groups[temperature, method], groups.get((temperature, str(baseline)), {})
        missing = [name for name in prompts if name not in plain]
        if missing:
            raise ValueError(f"no result of {baseline!r} for prompt {missing[0]!r} at temperature {temperature:g}")
        summaries.append(_summary(method, temperature, prompts, plain))
    return summaries


def doubts_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A clause if methods decoded in another time than their costs predict, all rows of each together."""
    totals: dict[str, list[float]] = {}
    for row in rows:
        if row.get("predicted_seconds"):
            total = totals.setdefault(row["method"], [0.0, 0.0])
            total[:] = total[0] + row["seconds"], total[1] + row["predicted_seconds"]
    wrong = [f"{took / costs:.2f} ({name})" for name, (took, costs) in totals.items() if not agree(took, costs)]
    return [f"decoding took {', '.join(wrong)} times what the costs predict"] if wrong else []


def _summary(method: str, temperature: float, prompts: Totals, plain: Totals) -> MethodSummary:
    mine = list(prompts.values())
    theirs = [plain[name] for name in prompts]
    total = {name: sum(entry[name] for entry in mine) for name in (*COUNTS, "seconds", "repeated")}
    accepted = total["num_accepted_tokens"]
    ratios = [_rate(a) / _rate(b) for a, b in zip(mine, theirs, strict=True)]
    clean = [r for r, a, b in zip(ratios, mine, theirs, strict=True) if max(_share(a), _share(b)) <= CLEAN_SHARE]
    compared = [entry["equal"] for entry in mine if "equal" in entry]
    columns = [[entry[name] for entry in some] for some in (mine, theirs) for name in ("num_emitted_tokens", "seconds")]
    return MethodSummary(
        method=method,
        temperature=temperature,
        prompts=len(mine),
        tokens_per_second_mean=sum(map(_rate, mine)) / len(mine),
        tokens_per_second_total=_rate(total),
        speedups=ratios,
        speedup=spread(ratios),
        speedup_total=total_speedup(*columns),
        speedup_clean=spread(clean) if clean else None,
        repeated_share=_share(total),
        draft_acceptance_rate=ratio(total["num_accepted_tokens"], total["num_draft_tokens"]),
        mean_draft_length=ratio(total["num_draft_tokens"], total["num_drafts"]),
        mean_acceptance_length=ratio(total["num_drafts"] + accepted, total["num_drafts"]),
        discarded_fraction=ratio(total["discarded_passes"], total["drafter_passes"]),
        equal=(sum(compared), len(compared)) if compared else None,
    )


def _rate(entry: Mapping[str, Any]) -> float:
    return entry["num_emitted_tokens"] / entry["seconds"]


def _share(entry: Mapping[str, Any]) -> float:
    return entry["repeated"] / max(entry["num_emitted_tokens"], 1)


def ratio(top: float, bottom: float) -> float | None:
    """Their ratio; None where there is nothing to divide by."""
    return float(top / bottom) if bottom else None
