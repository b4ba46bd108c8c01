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

from experiments.lib.cells import NONE, at_temperature, markdown
from experiments.lib.commands import command
from experiments.lib.long_live import Live, live_run
from experiments.lib.options import Output, Smoke
from experiments.lib.plots import INK, panels
from experiments.lib.rules import Rule, rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.summary import ratio
from experiments.lib.terminal import publish
from experiments.lib.traced import costs_or_default, traces_of
from specdec_jax.replay.long import LongRun, at_positions, forgotten, long_replay
from specdec_jax.replay.trace import Trace

KEYS = ("temperature", "rule", "start")
COURSE = 50  # points of a stored course
ROUNDS = ("drafted", "accepted", "passes", "entropy", "threshold")
FIGURES = ("threshold", "deviation", "acceptance", "entropy", "undrafted")


@dataclass(frozen=True)
class LongRunStudy(Output, Smoke):
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
            if folder.missing(KEYS, wanted):
                with console.status(f"{entry.name}, {at_temperature(temperature)}"):
                    found = _run(config, entry, trace, tokens)
                _add(config, folder, wanted, found)
    rows = folder.rows()
    publish(folder, report(rows, config), console, course=picture(rows))


def _run(config: LongRunStudy, entry: Rule, trace: Trace | None, tokens: int) -> LongRun:
    """All starts of a rule over one trace, or live."""
    most = config.max_draft_length
    chosen = entry.hyperparameters([dict(entry.policy.given)], costs_or_default(None), most)
    hyperparameters = {name: float(value[0]) for name, value in chosen.items()} | {"threshold": np.array(config.starts)}
    if trace is None:
        return live_run(config.decoder, entry.policy, hyperparameters, tokens, most, config.seed, config.smoke)
    order = text_order(trace, tokens, config.seed)
    return long_replay(trace, entry.policy, hyperparameters, order, max_draft_length=most)


def text_order(trace: Trace, tokens: int, seed: int) -> list[int]:
    """Texts that hold at least that many tokens: all in random order, again and again."""
    rng, rounds = np.random.default_rng(seed), -(-tokens // int(trace.length.sum()))
    order = np.concatenate([rng.permutation(trace.num_texts) for _ in range(rounds)])
    return order[: np.searchsorted(np.cumsum(trace.length[order]), tokens) + 1].tolist()


def _add(config: LongRunStudy, folder: RunFolder, wanted: Sequence[tuple[Any, ...]], run: LongRun) -> None:
    """The rows of all starts: they are played together and forgotten together."""
    missing = folder.missing(KEYS, wanted)
    for row, key in enumerate(wanted):
        if key in missing:
            figures = _late(run, row, forgotten(run, config.within)) | _course(run, row)
            folder.append(dict(zip(KEYS, key, strict=True)) | figures)


def _late(run: LongRun, row: int, end: int | None) -> dict[str, Any]:
    """A start's rounds, when it was forgotten, and means over its second half."""
    count = int(run.rounds[row])
    position = run.position[row, :count]
    late = np.flatnonzero(position >= run.tokens / 2)
    drafted, accepted, passes, entropy, threshold = (getattr(run, name)[row, late] for name in ROUNDS)
    return {
        "tokens": run.tokens,
        "rounds": count,
        "forgotten_tokens": end,
        "forgotten_rounds": None if end is None else int((position < end).sum()),
        "late_threshold": float(np.mean(threshold)),
        "late_deviation": float(np.std(threshold)),
        "late_acceptance": float(accepted.sum() / max(drafted.sum(), 1)),
        "late_entropy": float(np.nansum(entropy * passes) / max(passes.sum(), 1)),
        "late_undrafted": float(np.mean(drafted == 0)),
    }


def _course(run: LongRun, row: int) -> dict[str, Any]:
    """How a start goes on, in COURSE spans of the tokens."""
    count, edges = int(run.rounds[row]), np.linspace(0, run.tokens, COURSE + 1).astype(int)
    drafted, accepted, passes, entropy, _ = (getattr(run, name)[row, :count] for name in ROUNDS)
    bins = np.clip(np.searchsorted(edges, run.position[row, :count], side="right") - 1, 0, COURSE - 1)
    drafts, hits, looks, total = (
        np.bincount(bins, values, COURSE) for values in (drafted, accepted, passes, np.nan_to_num(entropy) * passes)
    )
    return {
        "course_tokens": edges[1:],
        "course_threshold": at_positions(run, run.threshold, edges[1:] - 1)[row],
        "course_acceptance": list(map(ratio, hits, drafts)),
        "course_entropy": list(map(ratio, total, looks)),
    }


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
    for (name, temperature), mine in _by_rule(rows).items():
        end, rounds = mine[0]["forgotten_tokens"], [row["forgotten_rounds"] for row in mine]
        when = ["never", NONE] if end is None else [str(end), f"{min(rounds)} to {max(rounds)}"]
        late = {figure: np.mean([row[f"late_{figure}"] for row in mine]) for figure in FIGURES}
        threshold = f"{late['threshold']:.3f} ±{late['deviation']:.3f}"
        shares = [f"{late['acceptance']:.0%}", f"{late['entropy']:.2f}", f"{late['undrafted']:.0%}"]
        lines.append([name, f"{temperature:g}", *when, threshold, *shares])
    return "\n\n".join([*parts, markdown(head, lines), "Lambda at the end, by start:", _ends(rows)]) + "\n"


def _by_rule(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """The rows, one a start, of each rule and temperature."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["rule"], row["temperature"]), []).append(row)
    return found


def _ends(rows: Sequence[dict[str, Any]]) -> str:
    starts = list(dict.fromkeys(row["start"] for row in rows))
    lines = []
    for (name, temperature), mine in _by_rule(rows).items():
        ends = {row["start"]: row["course_threshold"][-1] for row in mine}
        lines.append([name, f"{temperature:g}", *(f"{ends[start]:.3f}" for start in starts)])
    return markdown(["rule", "temp.", *(f"from {start:g}" for start in starts)], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Lambda, acceptance and entropy over the tokens: a column a temperature and rule, a line a start."""
    columns = _by_rule(rows)
    titles = [f"{name}, {at_temperature(temperature)}" for name, temperature in columns]
    figure, grid = panels(titles, 2.1, rows=3, width=3.2, least=5.3, sharex=True, sharey="row")
    names = {"threshold": "lambda", "acceptance": "accepted / drafted", "entropy": "entropy looked at, nats"}
    for column, mine in enumerate(columns.values()):
        for at, row in enumerate(mine):
            colour = (0.15 + 0.7 * at / max(len(mine) - 1, 1), 0.35, 0.75 - 0.6 * at / max(len(mine) - 1, 1))
            for axes, name in zip(grid[:, column], names, strict=True):
                course = np.array(row[f"course_{name}"], float)
                thin = {"lw": 1.5} if name == "threshold" else {"lw": 0.6, "alpha": 0.7}
                axes.plot(row["course_tokens"], course, color=colour, label=f"{row['start']:g}", **thin)
        if mine[0]["forgotten_tokens"] is not None:
            grid[0, column].axvline(mine[0]["forgotten_tokens"], color=INK, lw=0.8, ls=":")
        grid[-1, column].set_xlabel("tokens")
    tops = (1.02, 1.02, grid[2, 0].get_ylim()[1])  # rows share their axes: known only when all is drawn
    for axes, label, top in zip(grid[:, 0], names.values(), tops, strict=True):
        axes.set(ylabel=label, ylim=(0, top))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="lambda at the start", loc="outside right upper", frameon=False)
    return figure


main = command(LongRunStudy, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
