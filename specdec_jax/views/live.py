"""Progress bars, and one generation shown as it is decoded."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from specdec_jax.generation import Generation, Pair
from specdec_jax.streaming import stream
from specdec_jax.views.terminal import coloured_chunk, legend


def progress(console: Console) -> Progress:
    """A bar with a count, the time gone and the time left."""
    return Progress(
        TextColumn("{task.description:44s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def show_live(console: Console, pair: Pair, title: str, prompt: str, **options: Any) -> Generation:
    """Decode `prompt` with its tokens coloured as they come; where there is no terminal the end is printed once."""
    text, chunks = Text(), stream(prompt, pair=pair, **options)
    decode = pair.target.tokenizer.decode

    def panel(footer: str) -> Panel:
        return Panel(Group(text, Text(), legend()), title=f"{title}: {_short(prompt)}", subtitle=footer)

    with Live(panel("decoding"), console=console, refresh_per_second=20, transient=False) as live:
        while True:
            try:
                text.append_text(coloured_chunk(next(chunks), decode))
            except StopIteration as end:
                result: Generation = end.value
                break
            live.update(panel("decoding"))
        rate = result.statistics["draft_acceptance_rate"]
        accepted = "nothing drafted" if rate is None else f"{rate:.0%} of drafts accepted"
        live.update(panel(f"{len(result.tokens)} tokens, {result.statistics['num_rounds']} target passes, {accepted}"))
    return result


def _short(prompt: str, most: int = 60) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= most else line[: most - 1] + "…"
