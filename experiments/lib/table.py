"""The final table of an experiment, on the terminal and as Markdown, from the same cells."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from experiments.lib.cells import NONE, at_temperature, interval, markdown, terminal_table
from experiments.lib.summary import CLEAN_SHARE, MethodSummary

COLUMNS: tuple[str, ...] = (
    "method",
    "temp",
    "tokens/s, mean of prompts",
    "tokens/s, total",
    "speed-up, mean [95 %]",
    "median (quartiles)",
    "speed-up, total",
    "without repeats",
    "repeated",
    "acceptance rate",
    "draft length",
    "acceptance length",
    "discarded passes",
    "equal",
)


NAMES = COLUMNS[:2]  # of a row, in every table
FIRST = ("tokens/s, total", "speed-up, total", "speed-up, mean [95 %]", "median (quartiles)", "equal")  # on a terminal


def cells(summary: MethodSummary) -> tuple[str, ...]:
    """One row of the table, as text; in the order of COLUMNS."""
    return (
        summary.method,
        f"{summary.temperature:g}",
        f"{summary.tokens_per_second_mean:.1f}",
        f"{summary.tokens_per_second_total:.1f}",
        interval(summary.speedup.mean),
        f"{summary.speedup.median:.2f} ({summary.speedup.lower_quartile:.2f}–{summary.speedup.upper_quartile:.2f})",
        f"{summary.speedup_total.estimate:.2f}",
        _clean(summary),
        f"{summary.repeated_share:.0%}",
        _number(summary.draft_acceptance_rate),
        _number(summary.mean_draft_length),
        _number(summary.mean_acceptance_length),
        NONE if summary.discarded_fraction is None else f"{summary.discarded_fraction:.0%}",
        NONE if summary.equal is None else f"{summary.equal[0]}/{summary.equal[1]}",
    )


class Tables:
    """For a terminal: the columns in as many tables as its width asks for, since cells of one would be cut."""

    def __init__(self, summaries: Sequence[MethodSummary], title: str | None):
        self.summaries, self.title = summaries, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rest = [*FIRST, *(column for column in COLUMNS if column not in (*NAMES, *FIRST))]
        title = self.title
        while rest:
            fitting = [
                count
                for count in range(1, len(rest) + 1)
                if Measurement.get(console, options.update(width=1000), self._table(rest[:count])).maximum
                <= options.max_width
            ]
            count = max(fitting, default=1)
            yield self._table(rest[:count], title)
            yield ""
            rest, title = rest[count:], None
        yield Text(notes(self.summaries), style="dim")

    def _table(self, columns: Sequence[str], title: str | None = None) -> Table:
        return _terminal_table(self.summaries, (*NAMES, *columns), title)


def rich_table(summaries: Sequence[MethodSummary], title: str | None = None) -> Tables:
    """For a terminal; the fastest (by total) in bold."""
    return Tables(summaries, title)


def _terminal_table(summaries: Sequence[MethodSummary], columns: Sequence[str], title: str | None) -> Table:
    # rich cuts words sooner than lines
    heads = [column.replace(",", "").replace(" %", "\u00a0%").replace(" ", "\n") for column in columns]
    table = terminal_table(title, heads)
    table.collapse_padding, table.pad_edge, table.columns[0].no_wrap = True, False, True
    for number, summary in enumerate(summaries):
        last = number + 1 == len(summaries) or summaries[number + 1].temperature != summary.temperature
        text: dict[str, str] = dict(zip(COLUMNS, cells(summary), strict=True))
        style = "bold green" if _is_fastest(summary, summaries) else None
        table.add_row(*(text[column] for column in columns), end_section=last, style=style)
    return table


def markdown_table(summaries: Sequence[MethodSummary], title: str | None = None) -> str:
    """For table.md: the same cells, the fastest of each temperature in bold, and the notes below."""
    rows = []
    for summary in summaries:
        first, *others = (cell.replace("|", "\\|") for cell in cells(summary))
        rows.append([f"**{first}**" if _is_fastest(summary, summaries) else first, *others])
    return "\n".join([*([f"# {title}", ""] if title else []), markdown(COLUMNS, rows), "", notes(summaries), ""])


def against_table(summaries: Sequence[MethodSummary], rival: str) -> str:
    """How much faster than `rival`, which the summaries have as their baseline; Markdown, a line a method."""
    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    rows: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.method != rival:
            both = f"{interval(summary.speedup.mean)}, total {interval(summary.speedup_total)}"
            rows.setdefault(summary.method, []).append(both)
    heads = [f"over {rival}", *(at_temperature(temperature) for temperature in temperatures)]
    return markdown(heads, [[name, *found] for name, found in rows.items()])


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


def _clean(summary: MethodSummary) -> str:
    clean = summary.speedup_clean
    return f"{NONE} (0)" if clean is None else f"{clean.mean.estimate:.2f} ({clean.count})"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _is_fastest(summary: MethodSummary, summaries: Sequence[MethodSummary]) -> bool:
    rivals = [s.speedup_total.estimate for s in summaries if s.temperature == summary.temperature]
    return len(rivals) > 1 and summary.speedup_total.estimate == max(rivals)
