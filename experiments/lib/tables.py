"""The row that every comparison is made of, its figures, and tables of them: Markdown, printed whole on any terminal.

A row is a method, a rule or whatever is compared, on some texts: a list with a number for each text by column, so that
intervals and paired comparisons are made of rows alone. Columns: emitted, rounds, drafted, accepted, passes (of the
drafter), seconds, plain_seconds and repeated (a share). `summarise` makes them of timed results, trace_runs of replays.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console, ConsoleOptions
from rich.markdown import Markdown, TableElement
from rich.table import Table
from rich.text import Text

from experiments.lib.run_folder import TABLE, RunFolder
from specdec_jax.costs.cost_model import agree
from specdec_jax.loading.new_folder import replacing, write_text
from specdec_jax.metrics.intervals import Interval, mean_interval, ratio_of_totals, total_speedup

NONE = "–"
BRACKETS, PARENTHESES, WORDS = "[{}–{}]", "({}–{})", "({} to {})"  # how bounds are written
GAP = 2  # between columns on a terminal
Row = dict[str, Any]


def speedup(row: Row) -> Interval:
    """Speed-up over plain decoding by totals, with an interval over texts."""
    if "plain_emitted" in row:  # timed; other numbers of tokens where texts are sampled
        return total_speedup(row["emitted"], row["seconds"], row["plain_emitted"], row["plain_seconds"])
    return ratio_of_totals(row["plain_seconds"], row["seconds"])


def gain(row: Row, other: Row) -> Interval:
    """How many times faster than another row of the same texts, with a paired interval."""
    return ratio_of_totals(other["seconds"], row["seconds"])


def total(row: Row, name: str) -> float:
    """A column over all texts."""
    return float(np.sum(row[name]))


def per_round(row: Row, name: str) -> float:
    """A count by target pass."""
    return total(row, name) / total(row, "rounds")


def acceptance(row: Row) -> float:
    """Accepted over drafted tokens."""
    return total(row, "accepted") / max(total(row, "drafted"), 1)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, which may have bars, the others are numbers."""
    escaped = [[name.replace("|", "\\|"), *cells] for name, *cells in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *escaped)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(heads) - 1), *lines[1:]])


def crossed(head: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A Markdown table of cells by (line, column), both in the order of their first cells; NONE where there is none."""
    columns = dict.fromkeys(column for _, column in cells)
    names = dict.fromkeys(name for name, _ in cells)
    return markdown([head, *columns], [[name, *(cells.get((name, at), NONE) for at in columns)] for name in names])


def compared(rows: Mapping[str, Row], over: Sequence[str] = ()) -> str:
    """A Markdown table: speed-up, gain over each of some rows of the same texts (`over`), acceptance."""
    lines = []
    for name, row in rows.items():
        gains = [NONE if other == name else percent_more(gain(row, rows[other])) for other in over]
        accepted = [f"{acceptance(row):.0%}", f"{per_round(row, 'emitted'):.2f}"]
        lines.append([name, interval(speedup(row)), *gains, *accepted])
    return markdown(["rule", "speed-up", *(f"over {name}" for name in over), "accepted", "tokens a pass"], lines)


def interval(value: Sequence[float], form: str = ".2f", bounds: str = BRACKETS) -> str:
    """An estimate with its two bounds; alone where a single prompt, or no spread, gives none."""
    numbers = np.asarray(value, float)  # None of a row that was read is NaN
    estimate, low, high = (format(number, form) for number in numbers)
    return f"{estimate} {bounds.format(low, high)}" if numbers[2] > numbers[1] else estimate  # NaN is not above


def percent_more(value: Interval) -> str:
    """A ratio as the percentage above 1, with its interval; bold where the interval excludes 1."""
    texts = [f"{100 * (bound - 1):+.1f}" for bound in value]
    if not value.high > value.low:
        return f"{texts[0]} %"
    return bold(f"{texts[0]} % [{texts[1]}, {texts[2]}]", value)


def plus_minus(value: Interval, digits: int = 2) -> str:
    """An estimate and half of its interval, where there is one."""
    text = f"{value.estimate:.{digits}f}"
    return f"{text} ±{(value.high - value.low) / 2:.{digits}f}" if value.high > value.low else text


def bold(text: str, ratio: Interval) -> str:
    """The text, bold where the interval says that a ratio is not 1."""
    return f"**{text}**" if ratio.low > 1 or ratio.high < 1 else text


def at_temperature(temperature: float) -> str:  # in a title
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


class WholeTable(TableElement):
    """Cells wrap between words only. Columns that do not fit follow in a table of their own, names first again."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        heads = [] if self.header is None or self.header.row is None else [c.content for c in self.header.row.cells]
        rows = [] if self.body is None else [[cell.content for cell in row.cells] for row in self.body.rows]
        columns = [[Text(head.plain, "bold"), *(row[at] for row in rows)] for at, head in enumerate(heads)]
        words = lambda cell: [cell.plain] if cell.cell_len < 10 else cell.plain.split()  # noqa: E731
        least = [max(Text(word).cell_len for cell in cells for word in words(cell)) for cells in columns]
        whole = [max(cell.cell_len for cell in cells) for cells in columns]
        least[:1] = whole[:1]  # names never wrap
        groups: list[list[int]] = [[0]]
        for at in range(1, len(columns)):
            if len(groups[-1]) > 1 and sum(least[i] + GAP for i in [*groups[-1], at]) > options.max_width + GAP:
                groups.append([0])
            groups[-1].append(at)
        for group in groups:
            widths = whole if sum(whole[at] + GAP for at in group) <= options.max_width + GAP else least
            shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
            for at in group:
                shown.add_column(columns[at][0], width=widths[at], justify="right" if at else "left")
            for cells in zip(*(columns[at][1:] for at in group), strict=True):
                shown.add_row(*cells)
            yield shown
            yield Text()


class Whole(Markdown):
    """Markdown with such tables."""

    elements = {**Markdown.elements, "table_open": WholeTable}  # noqa: RUF012 - rich's own way


def publish(folder: RunFolder, text: str, console: Console, **pictures: Figure) -> None:
    """Writes table.md and NAME.png for each of the pictures, and prints the table."""
    write_text(folder.path / TABLE, text)
    for name, figure in pictures.items():
        with replacing(folder.path / f"{name}.png") as path:
            figure.savefig(path)
    console.print(Whole(text))
    console.print(f"Written to {folder.path}/")


CLEAN_SHARE = 0.05
"""A prompt counts as free of repeated text when at most this share of its tokens, the baseline's too, is repeated."""
TIMED_COLUMNS = {"emitted": "num_emitted_tokens", "rounds": "num_rounds", "drafts": "num_drafts", "seconds": "seconds"}
TIMED_COLUMNS |= {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}  # of a row: what a result calls it
TIMED_COLUMNS |= {"passes": "drafter_passes", "discarded": "discarded_passes"}


def summarise(results: Iterable[Mapping[str, Any]], baseline: str | None = None) -> list[Row]:
    """One row a temperature and method ("what"), in the results' order, with a number a prompt in every column.
    `baseline` is the first result's method unless named; its columns are plain_emitted, plain_seconds and
    plain_repeated. `predicted` are seconds by the costs, NaN without. `equal` says of the prompts that were compared
    whether the output is plain decoding's. Repeats of a prompt (results alike in prompt, method and temperature) are
    added up: tokens over seconds of all of them. Raises ValueError for no results, a missing key, or a prompt of a
    method without a result of the baseline."""
    groups: dict[tuple[float, str], dict[str, list[Mapping[str, Any]]]] = {}  # repeats by prompt
    for result in results:
        for name in (*TIMED_COLUMNS.values(), "repeated_share", "equals_plain"):
            if name not in result:
                raise ValueError(f"the result of prompt {result.get('prompt_id')!r} has no {name!r}")
        prompts = groups.setdefault((result["temperature"], result["method"]), {})
        prompts.setdefault(str(result["prompt_id"]), []).append(result)
    if not groups:
        raise ValueError("no results to summarise")
    rows, baseline = [], baseline or next(iter(groups))[1]
    for temperature, method in sorted(groups, key=lambda key: key[0]):  # stable: methods keep the results' order
        prompts, plain = groups[temperature, method], groups.get((temperature, baseline), {})
        missing = [name for name in prompts if name not in plain]
        if missing:
            raise ValueError(f"no result of {baseline!r} for prompt {missing[0]!r} at temperature {temperature:g}")
        row: Row = {"what": method, "temperature": temperature}
        for prefix, each in (("", prompts), ("plain_", plain)):
            mine = [each[name] for name in prompts]
            for column, name in TIMED_COLUMNS.items():
                row[f"{prefix}{column}"] = [sum(r[name] for r in repeats) for repeats in mine]
            tokens = [sum(r["repeated_share"] * r["num_emitted_tokens"] for r in repeats) for repeats in mine]
            row[f"{prefix}predicted"] = [sum(r.get("predicted_seconds") or np.nan for r in repeats) for repeats in mine]
            row[f"{prefix}repeated"] = list(tokens / np.maximum(row[f"{prefix}emitted"], 1))
        equal = [[r["equals_plain"] for r in repeats if r["equals_plain"] is not None] for repeats in prompts.values()]
        rows.append(row | {"equal": [all(repeats) for repeats in equal if repeats]})
    return rows


def doubts_of_rows(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """A clause if methods decoded in another time than their costs predict, all results of each together."""
    totals: dict[str, list[float]] = {}
    for result in results:
        if result.get("predicted_seconds"):
            sums = totals.setdefault(result["method"], [0.0, 0.0])
            sums[:] = sums[0] + result["seconds"], sums[1] + result["predicted_seconds"]
    wrong = [f"{took / costs:.2f} ({name})" for name, (took, costs) in totals.items() if not agree(took, costs)]
    return [f"decoding took {', '.join(wrong)} times what the costs predict"] if wrong else []


def predictions_table(rows: Sequence[Row]) -> list[str]:
    """Markdown blocks: predicted over measured seconds by method and temperature, and how far methods are apart."""
    cells, apart, first = {}, {}, rows[0]["what"]
    for row in rows:
        at, ratio = at_temperature(row["temperature"]), predicted_over_measured(row, first)
        if ratio is not None:
            cells[row["what"], at] = interval(ratio, ".3f")
            apart.setdefault(at, []).extend([ratio.estimate] if row["what"] != first else [])
    cells |= {("apart", at): f"{np.ptp(ratios):.3f}" if ratios else NONE for at, ratios in apart.items()}
    return [crossed("predicted over measured", cells), f"{NOTE_PREDICTED} {NOTE_APART}"] if apart else []


def predicted_over_measured(row: Row, first: str) -> Interval | None:
    """Ratio of the seconds by the costs to those by the clock, of the prompts with a prediction, None without one.

    Of methods after the first at the speed that the machine had at each prompt: both relative to the first method's.
    """
    predicted, seconds = np.array(row["predicted"]), np.array(row["seconds"])
    if row["what"] != first:
        predicted = predicted * np.array(row["plain_seconds"]) / np.array(row["plain_predicted"])
    finite = np.isfinite(predicted)
    return ratio_of_totals(predicted[finite], seconds[finite]) if finite.any() else None


NOTE_PREDICTED = (
    "Predicted over measured: seconds by the cost model, with the rule's own computation, over those by the clock, of "
    "methods after the first both relative to the first's on the same prompt; totals, with a 95 % bootstrap interval "
    "over prompts."
)
NOTE_APART = "Apart: the largest ratio of a method that drafts less the smallest, which favours it."


def rates(row: Row, prefix: str = "") -> np.ndarray:
    """[prompts]: tokens/s; with "plain_" the baseline's."""
    return np.array(row[f"{prefix}emitted"]) / np.array(row[f"{prefix}seconds"])


def speedups(row: Row, clean: bool = False) -> np.ndarray:
    """[prompts]: ratios to the baseline; with `clean` of the prompts free of repeated text."""
    each = rates(row) / rates(row, "plain_")
    return each[np.maximum(row["repeated"], row["plain_repeated"]) <= CLEAN_SHARE] if clean else each


def _ratio(top: str, bottom: str, form: str = ".2f", plus: int = 0) -> Callable[[Row], str]:
    """A column: one total over another; none where there is nothing to divide by."""
    return lambda row: format(plus + total(row, top) / total(row, bottom), form) if total(row, bottom) else NONE


def _without_repeats(row: Row) -> str:
    clean = speedups(row, clean=True)
    return f"{clean.mean():.2f} ({len(clean)})" if len(clean) else f"{NONE} (0)"


METHOD_COLUMNS: Mapping[str, Callable[[Row], str]] = {  # a narrow terminal shows the first ones in its first table
    "tokens/s, total": _ratio("emitted", "seconds", ".1f"),
    "speed-up, total": lambda row: f"{speedup(row).estimate:.2f}",
    "speed-up, mean [95 %]": lambda row: interval(mean_interval(speedups(row))),
    "median (quartiles)": lambda row: interval(np.quantile(speedups(row), (0.5, 0.25, 0.75)), bounds=PARENTHESES),
    "equal": lambda row: f"{sum(row['equal'])}/{len(row['equal'])}" if row["equal"] else NONE,
    "tokens/s, mean of prompts": lambda row: f"{rates(row).mean():.1f}",
    "without repeats": _without_repeats,
    "repeated": lambda row: f"{np.average(row['repeated'], weights=np.maximum(row['emitted'], 1)):.0%}",
    "acceptance rate": _ratio("accepted", "drafted"),
    "draft length": _ratio("drafted", "drafts"),
    "acceptance length": _ratio("accepted", "drafts", plus=1),
    "discarded passes": _ratio("discarded", "passes", ".0%"),
}


def methods_tables(rows: Sequence[Row]) -> list[str]:
    """Blocks of Markdown: a table a temperature, its fastest method (by total) in bold, and notes."""
    blocks = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        fast, lines = [speedup(row).estimate for row in here], []
        for row, speed in zip(here, fast, strict=True):
            mark = "**" if len(here) > 1 and speed == max(fast) else ""
            lines.append([f"{mark}{row['what']}{mark}", *(of(row) for of in METHOD_COLUMNS.values())])
        blocks += [f"## {at_temperature(temperature).capitalize()}", markdown(["method", *METHOD_COLUMNS], lines)]
    count = max((len(row["emitted"]) for row in rows), default=0)
    return [*blocks, f"{count} prompt{'s' * (count != 1)}. {NOTES}"]


NOTES = (
    "Speed-up is against plain decoding of the same target in the same "
    "program; 95 % bootstrap interval and quartiles over prompts; total: all tokens over all seconds. Without "
    f"repeats: mean over the prompts (their number) with at most {CLEAN_SHARE:.0%} repeated tokens. Acceptance "
    "rate: accepted over drafted tokens. Draft length: tokens a draft. Acceptance length: 1 + accepted tokens a "
    "draft, siblings among them. Discarded passes: drafter passes whose distribution gave no token. Equal: outputs "
    "that are plain decoding's token for token."
)


def against_table(rows: Sequence[Row], rival: str) -> str:
    """How much faster than `rival`, the baseline of the rows; Markdown, one line per method."""
    cells = {}
    for row in rows:
        if row["what"] != rival:
            both = f"{interval(mean_interval(speedups(row)))}, total {interval(speedup(row))}"
            cells[row["what"], at_temperature(row["temperature"])] = both
    return crossed(f"over {rival}", cells)
