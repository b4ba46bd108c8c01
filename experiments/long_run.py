"""Where does AdaEDL's lambda go in the long run, and how long does it remember where it began?

Question:  Over 20,000 tokens from one state, how do lambda, entropy and acceptance run, and after how many rounds do
           all start values give the same lambda?
Command:   python -m experiments.long_run TRACES... [--starts 0.3 0.9] [--live --tokens 20000]
Time:      half a minute for three temperatures on 2 cores; seconds with --smoke; --live takes ten minutes and more
Expected:  the built-in pair: lambda moves by at most 0.001 a round, so starts are forgotten after 1,000 to 1,500 rounds
           where the checked token is kept, and only after 6,000 or more as published, because rounds without drafts
           move nothing: 73 to 94 % of the late rounds. With the token kept lambda ends at its limit of 0.99
Output:    runs/long_run-<time>/ with manifest.json, results.jsonl (a line a temperature, rule and start, with its
           course), table.md and course.png; a stopped run goes on where it was with the same --out

By default the texts of a trace are replayed one after the other, in an order drawn by --seed and as often as the tokens
need, and the rule's state is carried from text to text (specdec_jax.replay.long says what is exact): a
session of many requests, at the cost of seconds. `--live` decodes one text of that length instead, all starts in one
batch. The target's context ends long before, so whenever a window is full the last half of it is processed again as
the prompt of the next, and the rule's state is carried over; drafts are cut at the end of a window.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional

from experiments.lib import studies
from experiments.lib.long_live import Live, live_run
from experiments.lib.plots import INK
from experiments.lib.rules import Rule, rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.traced import costs_or_default, traces_of
from specdec_jax.replay.long import LongRun, at_positions, forgotten, long_replay
from specdec_jax.replay.trace import Trace

KEYS = ("temperature", "rule", "start")
COURSE = 50  # points of a stored course


@dataclass(frozen=True)
class LongRunStudy:
    """Follow lambda over a long run from several starts."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote."""
    tokens: int = 20_000
    """Length of the run."""
    starts: tuple[float, ...] = (0.05, 0.3, 0.5, 0.7, 0.9)
    """Values of lambda to begin with."""
    rules: tuple[str, ...] = ("adaedl", "adaedl-keep")
    """Rules with a threshold, of experiments/lib/rules.py."""
    within: float = 0.01
    """Starts are forgotten when all lambdas stay this near to each other."""
    max_draft_length: int = 16
    """Most drafts a round."""
    live: bool = False
    """Decode instead of replaying; the traces are not read."""
    decoder: Live = Live()
    """What --live decodes with."""
    seed: int = 0
    """Of the order of the texts, or of the decoding."""
    smoke: bool = False
    """Made-up traces, or tiny models, and few tokens."""
    out: str | None = None
    """Run folder; none: runs/long_run-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(LongRunStudy, study, __doc__, arguments)


def study(config: LongRunStudy, console: Console) -> None:
    """Runs what is missing and writes the run folder."""
    tokens = min(config.tokens, 600) if config.smoke else config.tokens
    if tokens < 1 or len(config.starts) < 2 or not all(0 <= start <= 0.99 for start in config.starts):
        raise ValueError(f"tokens must be positive and two or more starts lie in [0, 0.99], got {config.starts}")
    rules = [rule(name) for name in config.rules]
    for entry in rules:
        if "threshold" not in entry.grid:
            raise ValueError(f"rule {entry.name!r} has no threshold to start with")
    if config.live:
        traces: dict[float, Trace | None] = {config.decoder.temperature: None}
    else:
        traces = dict(traces_of(config.traces, config.smoke, config.max_draft_length))
    folder = RunFolder.create("long_run", config, config.out)
    for temperature, trace in traces.items():
        for entry in rules:
            wanted = [(temperature, entry.name, start) for start in config.starts]
            if studies.missing(folder, KEYS, wanted):
                with console.status(f"{entry.name}, {studies.at_temperature(temperature)}"):
                    found = _run(config, entry, trace, tokens)
                _add(config, folder, wanted, found)
    rows = folder.rows()
    with folder.replacing("course.png") as path:
        picture(rows).savefig(path)
    studies.publish(folder, report(rows, config), console)


def _run(config: LongRunStudy, entry: Rule, trace: Trace | None, tokens: int) -> LongRun:
    """All starts of a rule over one trace, or live."""
    hyperparameters = entry.hyperparameters([dict(entry.policy.given)], costs_or_default(None), config.max_draft_length)
    hyperparameters = {name: float(value[0]) for name, value in hyperparameters.items()} | {
        "threshold": np.array(config.starts)
    }
    if trace is None:
        return live_run(
            config.decoder, entry.policy, hyperparameters, tokens, config.max_draft_length, config.seed, config.smoke
        )
    return long_replay(
        trace,
        entry.policy,
        hyperparameters,
        text_order(trace, tokens, config.seed),
        max_draft_length=config.max_draft_length,
    )


def text_order(trace: Trace, tokens: int, seed: int) -> list[int]:
    """Texts that hold at least that many tokens: all in random order, again and again."""
    rng, order, have = np.random.default_rng(seed), [], 0
    while have < tokens:
        for text in rng.permutation(trace.num_texts):
            if have < tokens:
                order.append(int(text))
                have += int(trace.length[text])
    return order


def _add(config: LongRunStudy, folder: RunFolder, wanted: Sequence[tuple[Any, ...]], run: LongRun) -> None:
    """The rows of all starts: they are played together and forgotten together."""
    end = forgotten(run, config.within)
    edges = np.linspace(0, run.tokens, COURSE + 1).astype(int)
    missing = studies.missing(folder, KEYS, wanted)
    thresholds = at_positions(run, run.threshold, edges[1:] - 1)
    for row, key in enumerate(wanted):
        count = int(run.rounds[row])
        position, late = run.position[row, :count], run.position[row, :count] >= run.tokens / 2
        fields = {name: getattr(run, name)[row, :count] for name in ("drafted", "accepted", "passes", "entropy")}
        bins = np.clip(np.searchsorted(edges, position, side="right") - 1, 0, COURSE - 1)
        sums = {name: np.bincount(bins, fields[name], COURSE) for name in ("drafted", "accepted", "passes")}
        looked = np.bincount(bins, np.nan_to_num(fields["entropy"]) * fields["passes"], COURSE)
        figures = {
            "tokens": run.tokens,
            "rounds": count,
            "forgotten_tokens": end,
            "forgotten_rounds": None if end is None else int((position < end).sum()),
            "late_threshold": float(np.mean(run.threshold[row, :count][late])),
            "late_deviation": float(np.std(run.threshold[row, :count][late])),
            "late_acceptance": float(fields["accepted"][late].sum() / max(fields["drafted"][late].sum(), 1)),
            "late_entropy": float(np.nansum(fields["entropy"][late] * fields["passes"][late]))
            / max(int(fields["passes"][late].sum()), 1),
            "late_undrafted": float(np.mean(fields["drafted"][late] == 0)),
            "course_tokens": edges[1:],
            "course_threshold": thresholds[row],
            "course_acceptance": _or_none(sums["accepted"], sums["drafted"]),
            "course_entropy": _or_none(looked, sums["passes"]),
        }
        if key in missing:
            folder.append(dict(zip(KEYS, key, strict=True)) | figures)


def _or_none(top: np.ndarray, bottom: np.ndarray) -> list[float | None]:
    return [float(t / b) if b else None for t, b in zip(top, bottom, strict=True)]


def report(rows: Sequence[dict[str, Any]], config: LongRunStudy) -> str:
    """When starts are forgotten, and where each ends."""
    how = "decoded live, windows overlapping by half" if config.live else "texts of a trace in random order"
    parts = [
        "# Long runs",
        f"{rows[0]['tokens']} tokens from one state, {how}. Forgotten: from then on all lambdas stay within "
        f"{config.within:g} of each other at every position of the text. Late: the second half of the tokens, all "
        "starts; lambda with its standard deviation over rounds; acceptance: accepted over drafted tokens; entropy: of "
        "the distributions that were looked at, nats; no draft: rounds without any.",
    ]
    head = ["rule", "temp.", "forgotten after tokens", "rounds", "late lambda", "acceptance", "entropy", "no draft"]
    lines = []
    for key in dict.fromkeys((row["rule"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["rule"], row["temperature"]) == key]
        end, rounds = mine[0]["forgotten_tokens"], [row["forgotten_rounds"] for row in mine]
        when = ["never", "–"] if end is None else [str(end), f"{min(rounds)} to {max(rounds)}"]
        late = [np.mean([row[f"late_{name}"] for row in mine]) for name in FIGURES]
        lines.append(
            [key[0], f"{key[1]:g}", *when, f"{late[0]:.3f} ±{late[1]:.3f}", f"{late[2]:.0%}", f"{late[3]:.2f}"]
            + [f"{late[4]:.0%}"]
        )
    parts.append(studies.table(head, lines))
    parts += ["Lambda at the end, by start:", _ends(rows)]
    return "\n\n".join(parts) + "\n"


FIGURES = ("threshold", "deviation", "acceptance", "entropy", "undrafted")


def _ends(rows: Sequence[dict[str, Any]]) -> str:
    starts = list(dict.fromkeys(row["start"] for row in rows))
    lines = []
    for key in dict.fromkeys((row["rule"], row["temperature"]) for row in rows):
        ends = {r["start"]: r["course_threshold"][-1] for r in rows if (r["rule"], r["temperature"]) == key}
        lines.append([key[0], f"{key[1]:g}", *(f"{ends[start]:.3f}" for start in starts)])
    return studies.table(["rule", "temp.", *(f"from {start:g}" for start in starts)], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Lambda, acceptance and entropy over the tokens: a column a temperature and rule, a line a start."""
    columns = list(dict.fromkeys((row["rule"], row["temperature"]) for row in rows))
    figure = Figure(figsize=(max(2.9 * len(columns), 4.5) + 0.8, 6.2), dpi=150, layout="constrained")
    panels = figure.subplots(3, len(columns), sharex=True, sharey="row", squeeze=False)
    names = {"threshold": "lambda", "acceptance": "accepted / drafted", "entropy": "entropy looked at, nats"}
    for column, key in enumerate(columns):
        mine = [row for row in rows if (row["rule"], row["temperature"]) == key]
        for at, row in enumerate(mine):
            colour = (0.15 + 0.7 * at / max(len(mine) - 1, 1), 0.35, 0.75 - 0.6 * at / max(len(mine) - 1, 1))
            for axes, name in zip(panels[:, column], names, strict=True):
                course = np.array(row[f"course_{name}"], float)
                thin = {"lw": 1.5} if name == "threshold" else {"lw": 0.6, "alpha": 0.7}
                axes.plot(row["course_tokens"], course, color=colour, label=f"{row['start']:g}", **thin)
        for axes, (name, label) in zip(panels[:, column], names.items(), strict=True):
            end = mine[0]["forgotten_tokens"]
            if end is not None and name == "threshold":
                axes.axvline(end, color=INK, lw=0.8, ls=":")
            studies.plain_axes(axes, f"{key[0]}, {studies.at_temperature(key[1])}" if name == "threshold" else "")
            if column == 0:
                axes.set_ylabel(label)
        panels[-1, column].set_xlabel("tokens")
    tops = (1.02, 1.02, panels[2, 0].get_ylim()[1])  # rows share their axes: known only when all is drawn
    for axes, top in zip(panels[:, 0], tops, strict=True):
        axes.set_ylim(0, top)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="lambda at the start", loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
