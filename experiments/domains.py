"""Code, mathematics, translation, instructions: where is each stopping rule strong?

Question:  By how much does each rule beat the best static length on each task, tuned on other prompts of that task?
Command:   python -m experiments.domains TRACES... [--tuning all] [--without-repeats]
Time:      half a minute for 84 prompts and three temperatures on 2 cores; seconds with --smoke (a made-up trace)
Expected:  the built-in pair, greedy: survival gains 19 % on translation, 12 % on instructions and summaries, 6 % on
           code, 2 % on mathematics; sampled, no rule gains more than 5 %; adaedl as published loses everywhere
Output:    runs/domains-<time>/ with manifest.json, results.jsonl (a line a temperature, task and rule), table.md and
           domains.png; a stopped run goes on where it was with the same --out

Settings are chosen on the prompts whose `split` is "calibrate" in the files of --splits and judged on those that say
"judge"; where an id of the trace is not found there, half of each task's texts, drawn by --seed, chooses. The static
length is tuned the same way, so a rule that gains here knows more than how easy the task is. `--tuning all` chooses
one setting for all tasks: what a user has who does not know what comes. Intervals resample the judged prompts, paired.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional

from experiments.lib import studies
from experiments.lib.prompts import HALVES, read_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.studies import COMPARED, STATIC, as_row, cell, chosen_rules
from experiments.lib.traced import (
    MOST_REPEATED,
    Judged,
    costs_or_default,
    faster,
    repeated_shares,
    replay_rule,
    texts_by_task,
)
from specdec_jax.replay.cost_model import CostModel
from specdec_jax.replay.replay import Replay, oracle
from specdec_jax.replay.trace import Trace, select

KEYS = ("temperature", "task", "rule")
ALL, ORACLE = "all", "oracle"


@dataclass(frozen=True)
class Domains:
    """Compare rules task by task."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote."""
    splits: str = "configs/prompts"
    """Folder of the JSONL files that say which half a prompt belongs to."""
    rules: tuple[str, ...] = COMPARED
    """Names in experiments/lib/rules.py; the best static length is always among them."""
    tuning: Literal["task", "all"] = "task"
    """Settings are chosen for each task, or one for all."""
    without_repeats: bool = False
    """Leave out answers of which more than a tenth repeats itself."""
    costs: str | None = None
    """cost_model.json of the machine; none: two x86 cores."""
    max_draft_length: int = 16
    """Most drafts a round."""
    seed: int = 0
    """Of the halves, where they are drawn, and of the intervals."""
    smoke: bool = False
    """Made-up traces."""
    out: str | None = None
    """Run folder; none: runs/domains-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(Domains, study, __doc__, arguments)


def study(config: Domains, console: Console) -> None:
    """Judges what is missing and writes the run folder."""
    rules, costs = chosen_rules(config.rules), costs_or_default(config.costs)
    costs.pass_times(config.max_draft_length)
    traces = studies.traces_of(config.traces, config.smoke, config.max_draft_length)
    splits = known_splits(config.splits)
    folder = RunFolder.create("domains", config, config.out)
    for temperature, trace in traces.items():
        chosen = select(trace, np.flatnonzero(repeated_shares(trace) <= MOST_REPEATED))
        trace = chosen if config.without_repeats else trace
        halves = calibrating(trace, splits, config.seed)
        wanted = [
            (temperature, task, name) for name in (*(r.name for r in rules), ORACLE) for task in _tasks(trace, halves)
        ]
        if studies.missing(folder, KEYS, wanted):
            with console.status(f"Replaying, {studies.at_temperature(temperature)}"):
                found = {entry.name: _judge(config, trace, entry, costs, halves) for entry in rules}
                found[ORACLE] = studies.as_judged(oracle(trace, config.max_draft_length), costs)
            _add(config, folder, trace, halves, found, costs, wanted)
    rows = folder.rows()
    with folder.replacing("domains.png") as path:
        picture(rows).savefig(path)
    studies.publish(folder, report(rows, config, costs), console)


def known_splits(folder: str) -> dict[str, str]:
    """The half of every prompt of the folder's JSONL files that names one, by id."""
    files = sorted(Path(folder).glob("*.jsonl"))
    return {prompt.id: prompt.split for file in files for prompt in read_prompts(file) if prompt.split in HALVES}


def calibrating(trace: Trace, splits: Mapping[str, str], seed: int) -> np.ndarray:
    """Which texts [N] choose settings; the others are judged."""
    ids = [str(name) for name in trace.about.get("ids", ())]
    if ids and all(name in splits for name in ids):
        return np.array([splits[name] == HALVES[0] for name in ids])
    first, rng = np.zeros(trace.num_texts, bool), np.random.default_rng(seed)
    for texts in texts_by_task(trace).values():
        first[rng.permutation(texts)[: len(texts) // 2]] = True
    return first


def _tasks(trace: Trace, halves: np.ndarray) -> dict[str, np.ndarray]:
    """The judged texts of every task that has texts in both halves, and those of all."""
    tasks = {task: texts for task, texts in texts_by_task(trace).items() if 0 < halves[texts].sum() < len(texts)}
    if not tasks:
        raise ValueError("no task has prompts in both halves; two a task are the least")
    judged = {task: texts[~halves[texts]] for task, texts in tasks.items()}
    return judged | {ALL: np.concatenate(list(judged.values()))}


def _judge(config: Domains, trace: Trace, entry: Any, costs: CostModel, halves: np.ndarray) -> Judged:
    """Every text at the setting that was fastest on the calibrating texts of its task, or of all tasks."""
    settings = entry.settings()
    found: Replay = replay_rule(trace, entry, costs, config.max_draft_length, settings)
    seconds = found.seconds(costs)
    best = np.full(trace.num_texts, int(np.argmin(seconds[:, halves].sum(axis=1))))
    chosen = {ALL: settings[best[0]]}
    if config.tuning == "task":
        for task, texts in texts_by_task(trace).items():
            mine = texts[halves[texts]]
            best[texts] = int(np.argmin(seconds[:, mine].sum(axis=1))) if len(mine) else best[texts]
            chosen[task] = settings[best[texts[0]]]
    at = (best, np.arange(trace.num_texts))
    counts = {name: getattr(found, name)[at].astype(float) for name in Judged._fields[1:-1]}
    return Judged(seconds=seconds[at], **counts, settings=(chosen,))


def _add(
    config: Domains,
    folder: RunFolder,
    trace: Trace,
    halves: np.ndarray,
    found: Mapping[str, Judged],
    costs: CostModel,
    wanted: Sequence[tuple[Any, ...]],
) -> None:
    """Writes the rows that are not there."""
    tasks = _tasks(trace, halves)
    for key in studies.missing(folder, KEYS, wanted):
        _, task, name = key
        texts = tasks[task]
        row = as_row(cell(trace, found[name], costs, texts, config.seed))
        row["settings"] = found[name].settings[0].get(task, found[name].settings[0].get(ALL))
        gain = faster(found[name].seconds[texts], found[STATIC].seconds[texts], config.seed)
        gains = {"over_static": gain.estimate, "over_static_low": gain.low, "over_static_high": gain.high}
        folder.append(dict(zip(KEYS, key, strict=True)) | {"texts": len(texts)} | row | gains)


def report(rows: Sequence[dict[str, Any]], config: Domains, costs: CostModel) -> str:
    """A table a temperature."""
    scope = "each task" if config.tuning == "task" else "all tasks together"
    parts = [
        "# Rules by task",
        f"Speed-up over the best static length, ± half of the 95 % interval over the judged prompts; in brackets the "
        f"share of the drafted tokens that were accepted. Settings, the static length too, were chosen on other "
        f"prompts, for {scope}. The first column of figures is the static length's speed-up over plain decoding. "
        f"Costs: {costs.device}, c = {costs.ratio:.3f}.",
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [row for row in rows if row["temperature"] == temperature]
        parts += [f"## {studies.at_temperature(temperature).capitalize()}", _by_task(mine)]
    return "\n\n".join(parts) + "\n"


def _by_task(rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name in dict.fromkeys(row["rule"] for row in rows) if name not in (STATIC, ORACLE)]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = {row["rule"]: row for row in rows if row["task"] == task}
        texts = []
        for name in names:
            row = here[name]
            half = (row["over_static_high"] - row["over_static_low"]) / 2
            texts.append(f"{row['over_static']:.2f} ±{half:.2f} ({row['acceptance']:.0%})")
        texts = studies.emphasised(texts, [here[name]["over_static"] for name in names])
        static = f"{here[STATIC]['speedup']:.2f} ({here[STATIC]['acceptance']:.0%})"
        first = f"{task.replace('_', ' ')} ({here[STATIC]['texts']})"
        lines.append([first, static, *texts, f"{here[ORACLE]['over_static']:.2f}"])
    return studies.table(["task (n)", *studies.headings([STATIC, *names, ORACLE])], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """A heat map a temperature: tasks down, rules across, the gain over the best static length printed."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = [name for name in dict.fromkeys(row["rule"] for row in rows) if name not in (STATIC, ORACLE)]
    size = (1.4 + (0.75 * len(names)) * len(temperatures) + 1.0, 1.7 + 0.48 * len(tasks))
    figure = Figure(figsize=(max(size[0], 6.0), size[1]), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    gains = [row["over_static"] for row in rows if row["rule"] in names]
    span = max(0.02, max(abs(gain - 1) for gain in gains))
    image = None
    for axes, temperature in zip(panels, temperatures, strict=True):
        mine = {(row["task"], row["rule"]): row for row in rows if row["temperature"] == temperature}
        image = _map(axes, mine, tasks, names, span)
        axes.set_title(studies.at_temperature(temperature), fontsize=11)
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="times the best static length's speed", shrink=0.9)
    figure.suptitle("Speed-up over the best static length (bold: the 95 % interval excludes 1)", fontsize=11)
    return figure


def _map(axes: Axes, cells: Mapping[Any, Any], tasks: Sequence[str], names: Sequence[str], span: float) -> Any:
    values = np.array(
        [[cells[task, name]["over_static"] if (task, name) in cells else np.nan for name in names] for task in tasks]
    )
    image = axes.imshow(values, cmap="RdBu", vmin=1 - span, vmax=1 + span, aspect="auto")
    for (down, across), value in np.ndenumerate(values):
        row = cells.get((tasks[down], names[across]))
        if row is not None:
            sure = row["over_static_low"] > 1 or row["over_static_high"] < 1
            weight = "bold" if sure else "normal"
            colour = "white" if abs(value - 1) > 0.6 * span else "#222222"
            axes.text(across, down, f"{value:.2f}", ha="center", va="center", color=colour, weight=weight, fontsize=9)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=9)
    axes.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks], fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


if __name__ == "__main__":
    sys.exit(main())
