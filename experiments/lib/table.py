"""The tables of experiments.compare, as Markdown."""

from collections.abc import Callable, Sequence

from experiments.lib.cells import NONE, at_temperature, interval, markdown
from experiments.lib.summary import CLEAN_SHARE, MethodSummary


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _clean(summary: MethodSummary) -> str:
    clean = summary.speedup_clean
    return f"{NONE} (0)" if clean is None else f"{clean.mean.estimate:.2f} ({clean.count})"


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
    "without repeats": _clean,
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
    """How much faster than `rival`, which the summaries have as their baseline; Markdown, a line a method."""
    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    rows: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.method != rival:
            both = f"{interval(summary.speedup.mean)}, total {interval(summary.speedup_total)}"
            rows.setdefault(summary.method, []).append(both)
    heads = [f"over {rival}", *(at_temperature(temperature) for temperature in temperatures)]
    return markdown(heads, [[name, *cells_of] for name, cells_of in rows.items()])


def notes(summaries: Sequence[MethodSummary]) -> str:
    """What the columns mean, in a few sentences."""
    count = max((summary.prompts for summary in summaries), default=0)
    return (
        f"{count} prompt{'s' * (count != 1)}. Speed-up is against plain decoding of the same target in the same "
        "program; 95 % bootstrap interval and quartiles over prompts; total: all tokens over all seconds. Without "
        f"repeats: mean over the prompts (their number) with at most {CLEAN_SHARE:.0%} repeated tokens. Acceptance "
        "rate: accepted over drafted tokens. Draft length: tokens a draft. Acceptance length: 1 + accepted tokens a "
        "draft, siblings among them. Discarded passes: drafter passes whose distribution gave no token. Equal: outputs "
        "that are plain decoding's token for token."
    )
