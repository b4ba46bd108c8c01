"""The `advise` command: how many tokens to draft, from a log of any engine or a trace."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specdec_jax.contrib.engine_logs.advice import Advice, Choice, advise, engine_options, schedule, thresholds
from specdec_jax.contrib.engine_logs.published import H100, costs_named
from specdec_jax.contrib.engine_logs.readers import Log, read_log
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.loading.new_folder import check_file, write_text
from specdec_jax.metrics.intervals import Interval
from specdec_jax.text.json_lines import json_text

BATCHES = (1, 4, 16, 64)  # for costs that apply to any batch size


def advise_on(command: Any, status: Callable[[str], AbstractContextManager[Any]]) -> bool:
    """Prints the page; returns whether drafting pays, or may pay, at some batch size.

    Args:
        command: the options, `app.commands.Advise`.
        status: shows a message while the block runs, such as `app.views.printing.status`.

    Raises:
        FileNotFoundError, ValueError: invalid input.
    """
    if command.json is not None:
        check_file(command.json)
    costs = costs_of(command)
    log = read_log(command.log, drafter=command.drafter, draft_length=command.draft_length)
    longest = min(command.max_draft_length, log.low.max_draft_length)
    with status("Playing static lengths"):
        advices = [advise(log, model, longest) for model in costs]
    chosen = {}
    if not log.likely.lengths_only and log.likely.num_texts > 1:
        with status("Trying thresholds"):
            chosen = thresholds(log.likely, costs[0], longest)
    console = Console(highlight=False)
    _show(console, log, costs, advices, chosen)
    # the length for the smallest batch, and a threshold if it is faster there
    best = advices[0].best.speedup.estimate
    better = {name: choice for name, choice in chosen.items() if choice.speedup.estimate > best}
    length = int(next((advice.best.setting for advice in advices if advice.best.setting), 0))
    options = engine_options(length, schedule(advices), better, min(longest, costs[0].widths[-1] - 1))
    for engine, words in options.items():
        console.print(Text(f"{engine}: {words}"), soft_wrap=True)
    if rates := [round(rate, 4) for rate in advices[0].curve]:
        synthetic = {"num_speculative_tokens": len(rates), "rejection_sample_method": "synthetic"}
        vllm = json.dumps(synthetic | {"synthetic_acceptance_rates": rates})
        llama = f"--spec-draft-n-max {len(rates)} --spec-synth-rates {','.join(f'{rate:g}' for rate in rates)}"
        console.print(Text("\nThe same acceptance without the models, for benchmarks only", "bold"))
        console.print(Text(f"vLLM: --speculative-config '{vllm}'\nllama.cpp: {llama}"), soft_wrap=True)
    if command.json is not None:
        report = {"log": {"kind": log.kind, "open": log.num_open, "texts": log.likely.num_texts}, "options": options}
        report |= {"advice": [advice._asdict() for advice in advices], "thresholds": chosen}
        write_text(command.json, json_text(report, indent=2) + "\n")
    return any(advice.best.setting > 0 for advice in advices)


def costs_of(command: Any) -> list[CostModel]:
    """The costs by batch size, ascending. Raises ValueError for duplicate batch sizes, and as `costs_named`."""
    models: list[CostModel] = []
    for words in command.costs or (H100,):
        batches: Sequence[int | None] = command.batch_sizes or (BATCHES if words == H100 else (None,))
        models += [costs_named(words, batch, command.max_draft_length) for batch in batches]
    sizes = [model.batch for model in models]
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"costs are needed once a batch size, got {sizes}")
    return sorted(models, key=lambda model: model.batch)


def _show(
    console: Console, log: Log, costs: Sequence[CostModel], advices: Sequence[Advice], chosen: Mapping[str, Choice]
) -> None:
    trace, first = log.likely, advices[0]
    text = f"{log.kind}: {trace.num_texts} texts, {trace.num_positions:,} tokens."
    text += " Intervals over fewer than ten texts are too narrow." if trace.num_texts < 10 else ""
    if not log.exact:
        text += (
            f" At {log.num_open:,} of them the log does not tell whether a draft would have been accepted: intervals "
            "reach from none to all."
        )
    console.print(Text("The log", "bold"), text, sep="\n")
    for note in log.notes:
        console.print(f"Note: {note}.")
    where, width = f", batch {first.batch}" if len(advices) > 1 else "", min(costs[0].widths[-1], 5)
    about = f": {costs[0].device}, " if costs[0].device else ": "
    extra = costs[0].pass_times(width - 1)[-1] / costs[0].plain_pass
    about += f"c = {costs[0].ratio:.3g}, a pass of {width} tokens takes {extra:.2f} plain ones"
    console.print(Text(f"\nStatic draft lengths{where}", "bold").append(about, "not bold"))
    table = _table("drafts", "speed-up", "95 %")
    beyond = log.longest_draft or trace.max_draft_length
    for choice in first.lengths[1:]:
        mark = f"{'*' if int(choice.setting) in first.as_good else ' '}{'?' if choice.setting > beyond else ' '}"
        table.add_row(f"{mark}{choice.setting}", *_cells(choice.speedup), style="bold" if choice is first.best else "")
    table.add_row("oracle", *_cells(first.oracle))
    console.print(table)
    near = "as fast as the best, as far as these texts tell" if log.exact else "intervals reach the best's lower end"
    console.print(f"* {near}. Oracle: no token is drafted that is rejected.")
    if beyond < len(first.lengths) - 1:
        console.print(f"? longer than any draft of the log ({beyond} tokens): extrapolated from successive rounds.")
    if len(advices) > 1:
        console.print()
        table = _table("batch", "drafts", "speed-up", "95 %", "oracle", "advice")
        for advice in advices:
            cells = f"{advice.best.setting}", *_cells(advice.best.speedup), f"{advice.oracle.estimate:.2f}"
            table.add_row(f"{advice.batch}", *cells, advice.verdict)
        console.print(Text("By batch size", "bold"), table, sep="\n")
    if trace.lengths_only:
        console.print("No confidence thresholds: they need the drafter's distributions, which this log lacks.")
    elif chosen:
        console.print()
        table = _table("confidence threshold", "best", "speed-up", "95 %")
        for engine, choice in chosen.items():
            table.add_row(engine, f"{choice.setting:.2f}", *_cells(choice.speedup))
        console.print(Text("Thresholds", "bold"), table, sep="\n")
        console.print("Speed-ups are at thresholds that the other half of the texts chose.")
    console.print()
    best, off = first.best, [advice.batch for advice in advices if advice.best.setting == 0]
    sure = "Draft" if first.verdict == "speculate" else "Perhaps draft"
    text = f"{sure} {best.setting} tokens{f' at batch {first.batch}' if len(advices) > 1 else ''}: "
    text += f"{best.speedup.estimate:.2f} ({best.speedup.low:.2f}–{best.speedup.high:.2f}) times plain decoding"
    if not best.setting:
        text = f"Do not speculate at batch {first.batch}"
    text += f"; not at a batch of {', '.join(map(str, off))}." if off and best.setting else "."
    if len(off) == len(advices):
        text = "Do not speculate: no draft length is predicted to be faster than plain decoding."
    console.print(Text(text, "bold"))


def _table(*heads: str) -> Table:
    columns = [Column(head, justify="right") for head in heads]
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _cells(interval: Interval) -> tuple[str, str]:
    return f"{interval.estimate:.2f}", f"{interval.low:.2f}–{interval.high:.2f}"
