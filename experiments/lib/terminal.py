"""Markdown on a terminal with tables whose names and numbers stay whole, however narrow it is."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from rich import box
from rich.console import Console, ConsoleOptions
from rich.markdown import Markdown, TableElement
from rich.table import Table
from rich.text import Text

from experiments.lib.run_folder import TABLE, RunFolder

GAPS = (2, 1)  # between columns; the narrow one where all columns stand side by side with it alone


class WholeTable(TableElement):
    """Cells wrap between words only. Columns that do not fit follow in a table of their own, names first again."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        heads = [] if self.header is None or self.header.row is None else [c.content for c in self.header.row.cells]
        rows = [] if self.body is None else [[cell.content for cell in row.cells] for row in self.body.rows]
        heads = [Text(head.plain, "bold") for head in heads]
        columns = [[head, *(row[at] for row in rows)] for at, head in enumerate(heads)]
        wide, narrow = (parts(columns, options.max_width, gap) for gap in GAPS)
        shown, gap = (narrow, GAPS[1]) if len(narrow) == 1 < len(wide) else (wide, GAPS[0])
        for part in shown:
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
            for (at, width), justify in zip(part, ["left"] + ["right"] * len(part), strict=False):
                table.add_column(heads[at], width=width, no_wrap=at == 0, justify=justify)
            for row in rows:
                table.add_row(*(row[at] for at, _ in part))
            yield table
            yield Text()


class Whole(Markdown):
    """Markdown with such tables."""

    elements = {**Markdown.elements, "table_open": WholeTable}  # noqa: RUF012 - rich's own way


def publish(folder: RunFolder, text: str, console: Console, **pictures: Figure) -> None:
    """Writes table.md and NAME.png for each of the pictures, and prints the table."""
    folder.write_text(TABLE, text)
    for name, figure in pictures.items():
        with folder.replacing(f"{name}.png") as path:
            figure.savefig(path)
    console.print(Whole(text))
    console.print(f"Written to {folder.path}/")


def parts(columns: Sequence[Sequence[Text]], width: int, gap: int) -> list[list[tuple[int, int]]]:
    """Which columns stand together, by index, and how wide each is; the first is in every part and never wraps."""
    widest = [max(cell.cell_len for cell in column) for column in columns]
    words = [[Text(word).cell_len for cell in column for word in cell.plain.split()] for column in columns]
    least = [max(lengths, default=0) for lengths in words]
    least[:1] = widest[:1]
    groups: list[list[int]] = [[0]]
    for at in range(1, len(columns)):
        if len(groups[-1]) > 1 and sum(least[i] + gap for i in [*groups[-1], at]) > width + gap:
            groups.append([0])
        groups[-1].append(at)
    fitted = []
    for part in groups:  # from the widest down, those columns first that can spare the most
        widths = {at: widest[at] for at in part}
        while sum(widths.values()) > width - gap * (len(part) - 1):
            at = max(part, key=lambda at: widths[at] - least[at])
            if widths[at] == least[at]:
                break
            widths[at] -= 1
        fitted.append(list(widths.items()))
    return fitted
