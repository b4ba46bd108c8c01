"""From rows (a prompt, a method, a temperature) to one line a method and temperature, and the tables of these lines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.lib.cells import NONE, at_temperature, interval, markdown
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
    speedup: Spread  # spread of `speedups`
    speedup_total: Interval  # total tokens/s over the baseline's
    speedup_clean: Spread | None  # `speedup` over prompts free of repeated text; None if there are none
    repeated_share: float  # fraction of all tokens
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


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


COLUMNS: dict[str, Callable[[MethodSummary], str]] = {  # a narrow terminal shows the first ones in its first table
    "method": lambda s: s.method.replace("|", "\\|"),
    "tokens/s, total": lambda s: f"{s.tokens_per_second_total:.1f}",
    "speed-up, total": lambda s: f"{s.speedup_total.estimate:.2f}",
    "speed-up, mean [95 %]": lambda s: interval(s.speedup.mean),
    "median (quartiles)": lambda s: interval(
        (s.speedup.median, s.speedup.lower_quartile, s.speedup.upper_quartile), bounds="({}–{})"
    ),
    "equal": lambda s: NONE if s.equal is None else f"{s.equal[0]}/{s.equal[1]}",
    "tokens/s, mean of prompts": lambda s: f"{s.tokens_per_second_mean:.1f}",
    "without repeats": lambda s: (
        f"{NONE} (0)" if s.speedup_clean is None else f"{s.speedup_clean.mean.estimate:.2f} ({s.speedup_clean.count})"
    ),
    "repeated": lambda s: f"{s.repeated_share:.0%}",
    "acceptance rate": lambda s: _number(s.draft_acceptance_rate),
    "draft length": lambda s: _number(s.mean_draft_length),
    "acceptance length": lambda s: _number(s.mean_acceptance_length),
    "discarded passes": lambda s: NONE if s.discarded_fraction is None else f"{s.discarded_fraction:.0%}",
}


def methods_tables(summaries: Sequence[MethodSummary]) -> list[str]:
    """Blocks of Markdown: a table a temperature, its fastest method (by total) in bold, and notes."""
    blocks = []
    for temperature in dict.fromkeys(summary.temperature for summary in summaries):
        here = [summary for summary in summaries if summary.temperature == temperature]
        fastest = max(summary.speedup_total.estimate for summary in here)
        rows = [[column(summary) for column in COLUMNS.values()] for summary in here]
        for row, summary in zip(rows, here, strict=True):
            if len(here) > 1 and summary.speedup_total.estimate == fastest:
                row[0] = f"**{row[0]}**"
        blocks += [f"## {at_temperature(temperature).capitalize()}", markdown(list(COLUMNS), rows)]
    return [*blocks, notes(summaries)]


def against_table(summaries: Sequence[MethodSummary], rival: str) -> str:
    """How much faster than `rival`, the baseline of the summaries; Markdown, one row per method."""
    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    rows: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.method != rival:
            both = f"{interval(summary.speedup.mean)}, total {interval(summary.speedup_total)}"
            rows.setdefault(summary.method, []).append(both)
    heads = [f"over {rival}", *(at_temperature(temperature) for temperature in temperatures)]
    return markdown(heads, [[name, *cells_of] for name, cells_of in rows.items()])


def notes(summaries: Sequence[MethodSummary]) -> str:
    """Explains the columns in a few sentences."""
    count = max((summary.prompts for summary in summaries), default=0)
    return (
        f"{count} prompt{'s' * (count != 1)}. Speed-up is against plain decoding of the same target in the same "
        "program; 95 % bootstrap interval and quartiles over prompts; total: all tokens over all seconds. Without "
        f"repeats: mean over the prompts (their number) with at most {CLEAN_SHARE:.0%} repeated tokens. Acceptance "
        "rate: accepted over drafted tokens. Draft length: tokens a draft. Acceptance length: 1 + accepted tokens a "
        "draft, siblings among them. Discarded passes: drafter passes whose distribution gave no token. Equal: outputs "
        "that are plain decoding's token for token."
    )
