"""Progress bars, and one generation shown as it is decoded."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.printing import one_line
from specdec_jax.app.views.terminal import coloured, legend
from specdec_jax.text.generation import Generation, Pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import stream


def progress(console: Console, **options: Any) -> Progress:
    """A progress bar with count, elapsed and remaining time; `options` are rich's."""
    description = TextColumn("{task.description:44s}", markup=False)
    rest = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(description, *rest, console=console, **options)


def show_live(
    console: Console, pair: Pair, title: str, prompt: str, sampling: SamplingParams, **options: Any
) -> Generation:
    """Decode `prompt` with live coloured tokens; without a terminal the result is printed once."""
    text = Text()
    with interrupts_end_here(), console.status(f"Compiling the live view of {title}"):
        chunks = stream(prompt, sampling, pair=pair, **options)

    def panel(shown: Text, footer: str) -> Panel:
        marks = legend(branches=pair.policy.rounds is not None)
        return Panel(Group(shown, Text(), marks), title=Text(f"{title}: {one_line(prompt, 60)}"), subtitle=footer)

    with Live(panel(text, "decoding"), console=console, refresh_per_second=20) as live:
        for chunk in chunks:
            text.append_text(coloured(chunk.pieces))
            # the last lines that fit: a live view would cut the new tokens at the end
            lines = text.wrap(console, max(console.width - 4, 1))[-max(console.height - 8, 1) :]
            live.update(panel(Text("\n").join(lines), "decoding"))
        result = chunks.result()
        rate = result.statistics["draft_acceptance_rate"]
        accepted = "nothing drafted" if rate is None else f"{rate:.0%} of drafts accepted"
        live.update(
            panel(text, f"{len(result.tokens)} tokens, {result.statistics['num_rounds']} target passes, {accepted}")
        )
    return result
