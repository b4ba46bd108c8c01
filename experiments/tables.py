"""Every table and picture of the results pages, made from the archive in results/, and the archive made of traces.

Question:  What do stopping rules gain, by pair and temperature, and do the contrasts named before the run hold?
Command:   python -m experiments.tables                              (the tables in README.md and docs/, and pictures)
           python -m experiments.tables build TRACES [--live RUN ...] (results/, from what experiments.record wrote)
           python -m experiments.tables prior TRACES                 (refits the numbers of survival's prior)
Time:      10 seconds; build: 35 minutes on 2 cores for all 110 cells, prior a minute
Output:    blocks between <!-- table: NAME --> and <!-- end: NAME --> of the pages, and pictures; build: results/

Rules are replayed over every recorded cell (experiments.record configs/evidence.py), with the costs of
PAIR/costs/cost_model.json in TRACES (experiments.step_cost), or else those of a run of experiments.compare (--live),
whose measured times are archived as well. A test fails where a page and the archive disagree.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from tyro.conf import Positional

from configs.base import Contrast
from experiments.lib import archive as files
from experiments.lib import plots
from experiments.lib.archive import ORACLE, Archive, Build, Group, build, hierarchical
from experiments.lib.commands import command, with_studies
from experiments.lib.rules import STATIC
from experiments.lib.run_folder import REPOSITORY
from experiments.lib.tables import (
    NONE,
    NOTE_PREDICTED,
    at_temperature,
    interval,
    markdown,
    percent_more,
    plus_minus,
    predicted_over_measured,
    speedup,
    summarise,
)
from specdec_jax.costs.cost_model import cost_model_of
from specdec_jax.loading.new_folder import write_text
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.replay.trace import load_trace
from specdec_jax.stopping.survival import PRIOR

READINGS = ("adaedl 0.7", "adaedl", "adaedl-first", "adaedl-keep")
CORE = (STATIC, *READINGS, "cumulative-confidence", "survival")
HEADLINE = (("reading", (0.0, 0.7, 1.0)), ("qwen", (0.0, 0.7)))
LONG_DRAFTS, LISTS = "static-8", ("drafted_at", "accepted_at")
POSITIONS = (1, 2, 3, 4, 6, 8)
LEVEL_BAND = (0.97, 1.03)
SAMPLED_AT = 0.7  # where sampled passes are measured


def headline(archive: Archive) -> str:
    """The rules that the README compares, on SmolLM2 and Qwen."""
    groups = headline_groups(archive)
    lines = [[rule, *(interval(group.speedup(rule)) for group in groups.values())] for rule in (*CORE, ORACLE)]
    return markdown(["speed-up over plain decoding", *groups], lines)


def headline_groups(archive: Archive) -> dict[str, Group]:
    """By title; all groups of an archive without these pairs."""
    every = {title: group for title, _, group in titled(archive)}
    wanted = [f"{pair}, {at_temperature(each)}" for pair, temperatures in HEADLINE for each in temperatures]
    return {title: every[title] for title in wanted if title in every} or every


def titled(archive: Archive) -> list[tuple[str, str, Group]]:
    """(title, pair, group) by temperature, of texts with the usual limit."""
    every = [(pair, t, group) for t in archive.temperatures for pair, group in archive.at(t).items()]
    return [(f"{pair}, {at_temperature(temperature)}", pair, group) for pair, temperature, group in every]


def speedups(archive: Archive, lengths: bool = False) -> str:
    """All pairs and temperatures, rules without or with `static-n`; of longer texts the rules of CORE."""
    blocks = []
    for limit in sorted({tokens for *_, tokens in archive.groups}):
        for temperature in archive.temperatures:
            if groups := archive.at(temperature, limit):
                names = [*dict.fromkeys(rule for group in groups.values() for rule in group.rules)]
                if limit != archive.manifest["config"]["max_new_tokens"]:
                    names = [name for name in names if name in (*CORE, ORACLE)]
                names = [name for name in names if lengths or not re.fullmatch(r"static-\d+", name)]
                title = f"**{at_temperature(temperature).capitalize()}, {limit} tokens**"
                blocks += [title, rules_table(groups, names)]
    return "\n\n".join([*blocks, NOTE_SPEEDUPS])


def rules_table(groups: Mapping[str, Group], names: Sequence[str]) -> str:
    """Rules down, pairs across; the fastest of a pair in bold."""
    speeds = {name: {pair: g.speedup(name) for pair, g in groups.items() if name in g.rules} for name in names}
    every = pd.DataFrame({name: {pair: each.estimate for pair, each in speeds[name].items()} for name in names})
    judged = every.drop(columns=ORACLE, errors="ignore").dropna(axis="columns")
    fastest, mean = judged.max(axis=1), np.log(every).mean()
    over_static = np.exp(np.log(judged.div(judged[STATIC], axis=0)).mean())
    worst, rank = judged.div(fastest, axis=0).min(), judged.rank(axis=1, ascending=False, method="min").mean()
    lines = []
    for name in sorted(names, key=lambda name: (name == ORACLE, -mean[name])):
        cells = []
        for pair in groups:
            text = plus_minus(speeds[name][pair]) if pair in speeds[name] else NONE
            cells.append(f"**{text}**" if name in judged and every.at[pair, name] == fastest[pair] else text)
        figures = [NONE] * 3
        if name in judged:
            figures = [f"{over_static[name]:.3f}", f"{100 * (worst[name] - 1):+.1f} %", f"{rank[name]:.1f}"]
        lines.append([name, *cells, *figures])
    return markdown(["rule", *groups, "over static", "worst", "rank"], lines)


NOTE_SPEEDUPS = (
    "Speed-ups over plain decoding in predicted time, ± half of the 95 % interval of a bootstrap over prompts and "
    "their seeds. Settings are chosen on the other half of a pair's prompts; *elsewhere*: on the other targets at that "
    "temperature; *price*: the threshold R (c + slope) with R of the best static length of the other half; "
    "`adaedl 0.7`, `static-n` and `survival` have none to choose. Over static: geometric mean over pairs. Bold, worst "
    "(the largest loss against a pair's fastest rule) and rank are selections among the rules shown on the same texts, "
    "which favours whatever is selected; contrasts have no such selection. `static-n` are in results/README.md."
)


def contrasts(archive: Archive) -> str:
    """Each contrast that was named before the run."""
    lines = []
    for each in archive.manifest["config"]["contrasts"]:
        contrast = Contrast(**each)
        rules = contrast.rule, contrast.over
        there = [t for t in contrast.temperatures if archive.totals(*rules, (t,), contrast.targets)]
        totals = archive.totals(*rules, there, contrast.targets)
        line = [contrast.name, " / ".join(rules), contrast.expected]
        if not totals:
            lines.append([*line, NONE, NONE, "not recorded"])
            continue
        ratio, population = hierarchical(totals), f"{len(totals)}, {'/'.join(f'{t:g}' for t in there)}"
        lines.append([*line, population, percent_more(ratio), verdict_of(contrast.expected, ratio)])
    coverage = archive.manifest["coverage"].items()
    simulated = ", ".join(f"{share:.0%} with {count} target{'s' * (count != '1')}" for count, share in coverage)
    heads = ["contrast", "rule / over", "expected", "targets, temperatures", "faster by", "verdict"]
    return f"{markdown(heads, lines)}\n\n{NOTE_CONTRASTS.replace('SIMULATED', simulated)}"


NOTE_CONTRASTS = (
    "Named in configs/evidence.py, with reasons, before anything was recorded. How much faster `rule` is than `over` "
    "in total predicted time, with the 95 % interval of a hierarchical bootstrap over targets, prompts and seeds, bold "
    "where it excludes 0. Level: within 3 % either way. In simulations with targets that vary as these do, a nominal "
    "95 % covers the truth in SIMULATED."
)


def verdict_of(expected: str, ratio: Interval) -> str:
    """What an interval says of an expectation."""
    low, high = (1.0, 1.0) if expected != "level" else LEVEL_BAND
    holds = {"faster": ratio.low > 1, "slower": ratio.high < 1, "level": low <= ratio.low and ratio.high <= high}
    fails = {"faster": ratio.high < 1, "slower": ratio.low > 1, "level": ratio.low > high or ratio.high < low}
    return "confirmed" if holds[expected] else "refuted" if fails[expected] else "open"


def gain(group: Group, rule: str, over: str) -> Interval:
    """How many times faster a rule is than another on the texts of a group."""
    return hierarchical([[(group.time(over), group.time(rule))]])


def adaedl(archive: Archive) -> str:
    """The readings of AdaEDL against the best static length."""
    lines = []
    for title, _, group in titled(archive):
        settings = np.nan_to_num(group.rules["adaedl"]["setting"], nan=0.7)  # NaN: the default
        chosen = "/".join(f"{value:.2g}" for value in np.unique(settings))
        gains = [percent_more(gain(group, reading, STATIC)) for reading in READINGS]
        keeping = percent_more(gain(group, "adaedl-keep", "adaedl"))
        lines.append([title, f"{group.speedup(STATIC).estimate:.2f}", *gains, keeping, chosen])
    heads = ["over the best static length", "static", "lambda 0.7", "lambda chosen", "first token drafted"]
    return markdown([*heads, "token kept", "kept over chosen", "lambda"], lines)


def moving_lambda(archive: Archive) -> str:
    """Static against dynamic lambda by kind of prompt, over all pairs: speed and acceptance rate."""
    rules, lines = ("adaedl, lambda fixed", "adaedl"), []
    for temperature in archive.temperatures:
        groups = list(archive.at(temperature).values())
        for kind in dict.fromkeys(kind for group in groups for kind in group.kinds):
            here = [(group, group.kinds == kind) for group in groups]
            line, times = [f"{kind}, {at_temperature(temperature)}"], []
            for rule in rules:
                times.append(np.concatenate([group.time(rule)[where].mean(axis=1) for group, where in here]))
                tokens = sum(group.texts["tokens"][where].mean(axis=1).sum() for group, where in here)
                counts = [sum(group.rules[rule][each][where].sum() for group, where in here) for each in LISTS]
                line += [f"{tokens / times[-1].sum():.2f}", f"{counts[1] / max(counts[0], 1):.2f}"]
            lines.append([*line, percent_more(ratio_of_totals(*times))])
    return markdown(["prompts", "static lambda", "accepted", "dynamic", "accepted", "dynamic over static"], lines)


def draft_length(archive: Archive) -> str:
    """Acceptance by position in drafts of eight, beside the similarity of the models."""
    lines = []
    for title, _, group in titled(archive):
        rates = acceptance_by_position(group)
        similar = hierarchical([[(group.texts["rate"], group.texts["tokens"])]])
        per_pass = group.texts["tokens"].sum() / group.rules[LONG_DRAFTS]["rounds"].sum()
        cells = [f"{rates[position - 1]:.2f}" for position in POSITIONS]
        lines.append([title, plus_minus(similar), *cells, f"{per_pass:.2f}"])
    heads = ["pair", "similarity", *(f"token {position}" for position in POSITIONS), "tokens a pass"]
    return f"{markdown(heads, lines)}\n\n{NOTE_LENGTH}"


NOTE_LENGTH = (
    "Similarity: the mean of sum min(p, q) over all tokens of the target's text (greedy: how often both models name "
    "the same token). Token n: the share of drafts of eight whose n-th token is accepted; drafts begin where one was "
    "rejected, at harder tokens than most."
)


def acceptance_by_position(group: Group) -> np.ndarray:
    """[K], accepted over drafted n-th tokens of long drafts."""
    counts = [group.rules[LONG_DRAFTS][name].sum(axis=(0, 1)) for name in LISTS]
    return counts[1] / np.maximum(counts[0], 1)


def tightness(archive: Archive) -> str:
    """AdaEDL's bound against the acceptance rate, by drafter."""
    lines = []
    for title, pair, group in titled(archive):
        tokens, size = group.texts["tokens"], archive.manifest["pairs"][pair]["drafter_size"]
        rate, bound = (hierarchical([[(group.texts[name], tokens)]]) for name in ("rate", "bound"))
        above = group.texts["above"].sum() / tokens.sum()
        figures = [plus_minus(rate), plus_minus(bound), f"{rate.estimate - bound.estimate:+.2f}", f"{above:.0%}"]
        lines.append([title, size, *figures])
    heads = ["pair", "drafter", "acceptance rate", "1 - sqrt(0.2 H)", "slack", "tokens at which it is above the rate"]
    return markdown(heads, lines)


def clock(archive: Archive) -> str:
    """Timed runs: measured speed-ups, and predicted over measured time."""
    if archive.live.empty:
        return "No timed run is archived yet."
    blocks = []
    for pair, part in archive.live.groupby("pair", sort=False):
        rows = {(row["what"], row["temperature"]): row for row in summarise(part.to_dict("records"))}
        at, lines = dict.fromkeys(temperature for _, temperature in rows), []
        for method in dict.fromkeys(method for method, _ in rows):
            line = [method]
            for row in (rows.get((method, temperature)) for temperature in at):
                if row is None:
                    line += [NONE, NONE]
                    continue
                ratio = predicted_over_measured(row, next(iter(rows))[0])
                line += [interval(speedup(row)), NONE if ratio is None else interval(ratio, ".3f")]
            lines.append(line)
        heads = [text for temperature in at for text in (at_temperature(temperature), "predicted over measured")]
        count = len(next(iter(rows.values()))["emitted"])
        blocks += [f"**{pair}**, {count} prompts", markdown(["method", *heads], lines)]
    return "\n\n".join([*blocks, NOTE_CLOCK])


NOTE_CLOCK = f"Speed-up: over plain decoding of the same prompts in the same process. {NOTE_PREDICTED}"


def costs(archive: Archive) -> str:
    """Costs of every pair, of the rules' own computation, and what was not measured."""
    lines, rules, notes = [], {}, {}
    for pair, fields in archive.manifest["costs"].items():
        model = cost_model_of(fields)
        for temperature in (0.0, SAMPLED_AT) if model.sampled_plain else (0.0,):
            here = model.at(temperature=temperature)
            wide = [f"{here.verification_times(width - 1)[-1]:.2f}" for width in (2, 4, 8, 16)]
            figures = f"{1e3 * here.plain_pass:.2f}", f"{here.ratio:.3f}", *wide
            lines.append([f"{pair}, {'sampled' if temperature else 'greedy'}", *figures])
        for rule in model.rules:
            rules.setdefault(rule, []).append(pair)
        note = model.device.partition(":")[0] + ("." if model.rules else f"; {model.left_out(SAMPLED_AT)}.")
        notes.setdefault(note + "".join(f" Doubtful: {doubt}." for doubt in model.doubts), []).append(pair)
    heads = ["pair", "plain pass, ms", "c", *(f"V({width})" for width in (2, 4, 8, 16))]
    blocks = ["c: a drafter pass, V(n): a pass of n tokens, in plain passes.", markdown(heads, lines)]
    lines = [[rule[0], ", ".join(at), *(f"{1e6 * each:.0f}" for each in rule[1:])] for rule, at in rules.items()]
    heads = ["a rule's own computation, µs", "pairs", "a pass, greedy", "a round", "a pass, sampled", "a round"]
    blocks += [markdown(heads, lines)] if rules else []
    return "\n\n".join([*blocks, "\n".join(f"- {', '.join(pairs)}: {note}" for note, pairs in notes.items())])


def recorded_cells(archive: Archive) -> str:
    """What has been recorded, and what is still missing."""
    lines = []
    for (pair, temperature, limit), group in archive.groups.items():
        tokens = int(group.texts["tokens"].sum())
        size = [str(len(group.prompts)), str(len(group.seeds)), f"{tokens:,}"]
        lines.append([f"{pair}, {at_temperature(temperature)}, up to {limit} tokens", *size])
    every, cells = sum(int(group.texts["tokens"].sum()) for group in archive.groups.values()), archive.manifest["cells"]
    about = f"{len(cells)} of {len(cells) + len(archive.manifest['missing'])} cells, {every:,} tokens, with commits "
    about += ", ".join(sorted({cell["git"]["revision"][:8] for cell in cells if cell["git"]}))
    about += f" on {' and '.join(sorted({cell['processor'] for cell in cells}))}."
    return f"{about}\n\n{markdown(['texts of', 'prompts', 'seeds', 'tokens'], lines)}"


TABLES: dict[str, Callable[[Archive], str]] = {
    "headline": headline,
    "speedups": speedups,
    "all_rules": lambda archive: speedups(archive, lengths=True),
    "contrasts": contrasts,
    "adaedl": adaedl,
    "lambda": moving_lambda,
    "draft_length": draft_length,
    "tightness": tightness,
    "clock": clock,
    "costs": costs,
    "cells": recorded_cells,
}
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def with_tables(page: str, archive: Archive) -> str:
    """A page with its blocks made anew. Raises ValueError for a block of an unknown name, or without an end."""

    def made(block: re.Match[str]) -> str:
        if block[2] not in TABLES:
            raise ValueError(f"no table {block[2]!r}: there are {', '.join(TABLES)}")
        return f"{block[1]}\n{TABLES[block[2]](archive)}\n\n{block[3]}"

    if page.count("<!-- table: ") != len(BLOCK.findall(page)):
        raise ValueError("a table of the page has no end: <!-- end: NAME -->")
    return BLOCK.sub(made, page)


def pictures(archive: Archive, folder: Path) -> None:
    """Writes headline.png and draft_length.png."""
    groups = headline_groups(archive)
    points = {title: [(rule, *g.speedup(rule)) for rule in (*CORE, ORACLE)] for title, g in groups.items()}
    lines: dict[str, dict[str, plots.Line]] = {}
    for temperature in archive.temperatures:
        groups = archive.at(temperature)
        panel = {pair: (range(1, 9), acceptance_by_position(group)[:8].tolist()) for pair, group in groups.items()}
        lines[at_temperature(temperature)] = panel
    axes = "n-th token of a draft of eight", "share accepted"
    plots.dots_figure(points, "speed-up over plain decoding, 95 % interval").savefig(folder / "headline.png")
    plots.lines_figure(lines, axes, ticks=range(1, 9)).savefig(folder / "draft_length.png")


@dataclass(frozen=True)
class Tables:
    """Make the tables and pictures of the pages."""

    results: Path = files.FOLDER  # The archive.


def make_tables(options: Tables, console: Console) -> None:
    """Rewrites the blocks of README.md and docs/, and the pictures."""
    archive = files.read_archive(options.results)
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = with_tables(before, archive)
        if after != before:
            write_text(page, after)
            console.print(f"{page.relative_to(REPOSITORY)}: tables made anew")
    pictures(archive, REPOSITORY / "docs" / "images")


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), files.FOLDER / "README.md"]


@dataclass(frozen=True)
class PriorOptions:
    """Refit the numbers of `survival`'s prior."""

    traces: Positional[Path]
    """The folder that python -m experiments.record configs/evidence.py wrote."""
    pairs: tuple[str, ...] = ("base", "nano", "reading", "qwen")  # Pairs whose traces are fitted, if they are there.


def refit(options: PriorOptions, console: Console) -> None:
    """Prints the prior of the first seed's sampled traces beside the rule's default. Raises FileNotFoundError: none."""
    every = [path for pair in options.pairs for path in sorted((options.traces / pair).glob("128-seed0/trace-*.npz"))]
    sampled = [load_trace(path) for path in every if path.name != "trace-0.npz"]
    if not sampled:
        raise FileNotFoundError(f"no sampled traces of {', '.join(options.pairs)} in {str(options.traces)!r}")
    priors = {f"{len(sampled)} traces": fit_prior(*sampled), "the rule's default": PRIOR}
    lines = [[title, *(f"{weight:.2f}" for weight in prior)] for title, prior in priors.items()]
    console.print(markdown(["prior", "bias", "weight of log temperature"], lines))


tables = command(Tables, make_tables, __doc__, "python -m experiments.tables")
builds = command(Build, build, __doc__, "python -m experiments.tables build")
priors = command(PriorOptions, refit, __doc__, "python -m experiments.tables prior")
main = with_studies(tables, build=builds, prior=priors)

if __name__ == "__main__":
    raise SystemExit(main())
