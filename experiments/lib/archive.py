"""The archive of results: its files, intervals by a hierarchical bootstrap, and how it is made of traces.

rows.parquet has a row for a rule on a text, texts.parquet one for a text, live.parquet one for a timed generation;
manifest.json has versions, costs and the cells that were recorded. Tables need nothing else. It is built of rules
replayed over every cell, each with the setting that is chosen on other texts.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from tyro.conf import Positional

from configs.base import EvidenceConfig, JudgedRule, describe, load_config
from experiments.lib.rules import STATIC
from experiments.lib.rules import rule as rule_of
from experiments.lib.run_folder import MANIFEST, REPOSITORY, environment, read_manifest, read_rows, write_text
from experiments.lib.tables import TIMED_COLUMNS
from experiments.lib.trace_runs import ORACLE, half_of, replay_rule
from experiments.record import Cell, Key, cells
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.cost_model import CostModel, cost_model_of, load_cost_model
from specdec_jax.metrics.intervals import LEVEL, Interval
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.replay.replay import oracle
from specdec_jax.replay.trace import FEATURES, Trace, load_trace

FOLDER = REPOSITORY / "results"
ROWS, TEXTS, LIVE = "rows.parquet", "texts.parquet", "live.parquet"
KEYS = ["pair", "temperature", "limit"]  # of a group of texts
RESAMPLES, SIMULATIONS, FEW = 1999, 400, 399  # of an interval, of a simulated coverage, and of each interval in it
Totals = tuple[np.ndarray, np.ndarray]  # numerators and denominators [P, S]: prompts by seeds


class Group(NamedTuple):
    """All texts of a pair at a temperature and a limit of tokens; arrays are [P, S] or [P, S, K]."""

    prompts: list[str]
    kinds: np.ndarray  # [P]
    seeds: list[int]
    texts: dict[str, np.ndarray]  # columns of texts.parquet
    rules: dict[str, dict[str, np.ndarray]]
    """By rule the columns of rows.parquet, with `drafted_at` and `accepted_at`, rounds that have an n-th token."""
    costs: CostModel  # at the temperature, without the computation of rules

    def time(self, rule: str) -> np.ndarray:
        """[P, S], predicted time in passes of plain decoding."""
        return self.rules[rule]["seconds"].astype(np.float64) / self.costs.plain_pass

    def speedup(self, rule: str) -> Interval:
        """Over plain decoding, by totals."""
        return hierarchical([[(self.texts["tokens"], self.time(rule))]])


class Archive(NamedTuple):
    """The files as they were read."""

    groups: dict[Key, Group]
    live: pd.DataFrame
    manifest: dict[str, Any]

    def at(self, temperature: float, limit: int | None = None) -> dict[str, Group]:
        """The groups by pair, in the order of the config, at a temperature and a limit (that of most texts)."""
        tokens = self.manifest["config"]["max_new_tokens"] if limit is None else limit
        return {pair: group for (pair, *key), group in self.groups.items() if key == [temperature, tokens]}

    @property
    def temperatures(self) -> list[float]:
        """Ascending."""
        return sorted({temperature for _, temperature, _ in self.groups})

    def totals(
        self, rule: str, over: str, temperatures: Sequence[float], targets: Sequence[str] = ()
    ) -> list[list[Totals]]:
        """By target, of all or of these, the predicted times of `over` and of `rule`, [P, S] at each of the
        temperatures that have both, summed over the target's pairs."""
        totals: dict[str, list[Totals]] = {}
        for temperature in temperatures:
            by_target: dict[str, list[Group]] = {}
            for group in self.at(temperature).values():
                target = group.texts["target"][0, 0]
                if (not targets or target in targets) and {rule, over} <= group.rules.keys():
                    by_target.setdefault(target, []).append(group)
            for target, groups in by_target.items():
                seeds = min(len(group.seeds) for group in groups)
                times = [sum(group.time(name)[:, :seeds] for group in groups) for name in (over, rule)]
                totals.setdefault(target, []).append((times[0], times[1]))
        return list(totals.values())


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """The manifest of an archive and its other files by name. Raises FileNotFoundError for no archive, ValueError for a
    file that is not the one that was written."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"no archive in {str(folder)!r}: python -m experiments.tables build writes one")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name, expected in manifest["sha256"].items():
        if digest(folder / name) != expected:
            raise ValueError(f"{folder / name} is not the file that was written with {MANIFEST}: its checksum differs")
    return manifest, {name: pd.read_parquet(folder / name) for name in manifest["sha256"]}


def read_archive(folder: Path = FOLDER) -> Archive:
    """Raises as `read_files`."""
    manifest, frames = read_files(folder)
    return Archive(groups_of(frames[TEXTS], frames[ROWS], manifest), frames.get(LIVE, pd.DataFrame()), manifest)


def groups_of(texts: pd.DataFrame, rows: pd.DataFrame, manifest: Mapping[str, Any]) -> dict[Key, Group]:
    """Texts and rows by group; within one they lie by rule, then by seed, then by prompt."""
    groups: dict[Key, Group] = {}
    for key, part in texts.groupby(KEYS, sort=False, observed=True):
        seeds = part["seed"].unique().tolist()
        each = {name: _by_prompt(part[name], len(seeds)) for name in part}
        costs = cost_model_of(manifest["costs"][key[0]]).at(temperature=key[1])
        groups[key] = Group(each["prompt"][:, 0].tolist(), each["kind"][:, 0], seeds, each, {}, costs)
    for (*key, rule), part in rows.groupby([*KEYS, "rule"], sort=False, observed=True):
        group = groups[tuple(key)]
        if len(part) < group.texts["tokens"].size:
            continue  # judged since some of the seeds were recorded
        each = {name: _by_prompt(part[name], len(group.seeds)) for name in part}
        for name in ("drafted", "accepted"):  # rounds by number of tokens, as rounds that have an n-th token
            each[f"{name}_at"] = each.pop(name)[..., ::-1].cumsum(axis=-1)[..., ::-1]
        group.rules[rule] = each
    return groups


def _by_prompt(column: pd.Series, seeds: int) -> np.ndarray:
    values = column.to_numpy()
    values = np.stack(values) if isinstance(values[0], np.ndarray) else values
    return values.reshape(seeds, -1, *values.shape[1:]).swapaxes(0, 1)


def hierarchical(targets: Sequence[Sequence[Totals]], resamples: int = RESAMPLES, salt: int = 0) -> Interval:
    """Ratio of total numerators to total denominators, where every text counts by its mean over seeds; with a
    percentile interval for which targets, then prompts of a target, then seeds of a prompt are resampled.

    Args:
        targets: of every target arrays (numerators, denominators) [P, S] of the same P prompts, one of each
            temperature, whose seeds are independent.
        salt: other random numbers.
    """
    totals = np.zeros((2, resamples))
    estimate = np.zeros(2)
    for number, strata in enumerate(targets):
        for stratum, pair in enumerate(strata):
            weights = _weights(len(targets), number, stratum, pair[0].shape, resamples, salt)
            totals += [np.tensordot(weights, values, 2) for values in pair]
            estimate += [values.mean(axis=1).sum() for values in pair]
    low, high = np.percentile(totals[0] / totals[1], [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(float(estimate[0] / estimate[1]), float(low), float(high))


@functools.lru_cache(maxsize=64)
def _weights(targets: int, number: int, stratum: int, shape: tuple[int, int], resamples: int, salt: int) -> np.ndarray:
    """[B, P, S] float32, how often a target's texts are drawn, over S. Its strata share the prompts that are drawn."""
    prompts, seeds = shape
    chosen = np.random.default_rng([salt, targets]).integers(0, targets, (resamples, targets))
    times = (chosen == number).sum(axis=1)
    rng = np.random.default_rng([salt, targets, number, prompts])
    counts = rng.multinomial(times * prompts, np.full(prompts, 1 / prompts))
    if seeds == 1:
        return counts[:, :, None].astype(np.float32)
    rng = np.random.default_rng([salt, targets, number, prompts, seeds, stratum])
    return (rng.multinomial(counts * seeds, np.full(seeds, 1 / seeds)) / seeds).astype(np.float32)


def coverage(targets: Sequence[Sequence[Totals]]) -> float:
    """How often the interval of `hierarchical` covers the ratio of a population, in simulations: targets with log
    ratios that vary as those of the data do, and prompts and seeds drawn from the data."""
    sums = [np.sum([[values.mean(axis=1).sum() for values in pair] for pair in strata], axis=0) for strata in targets]
    ratios = np.log([top / bottom for top, bottom in sums])
    spread = float(ratios.std(ddof=1)) if len(ratios) > 1 else 0.0
    middle = float(ratios.mean())
    truth, covered = np.exp(middle + spread**2 / 2), 0
    for number in range(SIMULATIONS):
        rng, drawn = np.random.default_rng([7, number]), []
        for strata, ratio in zip(targets, ratios, strict=True):
            scale = np.exp(middle + spread * rng.standard_normal() - ratio)
            prompts = rng.integers(0, len(strata[0][0]), len(strata[0][0]))
            seeds = [rng.integers(0, pair[0].shape[1], pair[0].shape) for pair in strata]
            texts = [
                [np.take_along_axis(each, at, 1)[prompts] for each in pair]
                for pair, at in zip(strata, seeds, strict=True)
            ]
            drawn.append([(scale * top, bottom) for top, bottom in texts])
        interval = hierarchical(drawn, FEW, salt=1)
        covered += interval.low <= truth <= interval.high
    return covered / SIMULATIONS


PRICED = 8  # drafts over which the price takes the slope of the verification times
FACTOR = 0.2  # AdaEDL's entropy factor
TIMED = ("prompt_id", "category", "method", "temperature", "repeat", "predicted_seconds", "repeated_share")
TIMED = (*TIMED, "equals_plain", *TIMED_COLUMNS.values())  # of a timed result


class Texts(NamedTuple):
    """The traces of a group, one a seed, of the same prompts."""

    cells: list[Cell]
    traces: list[Trace]
    costs: CostModel  # at the temperature, without the computation of rules

    @property
    def plain(self) -> np.ndarray:
        """[N] float64, seconds of plain decoding of all texts, seed by seed."""
        return np.concatenate([trace.length for trace in self.traces]) * self.costs.plain_pass


class Replays(NamedTuple):
    """A rule's settings over the texts of a group, [settings, N] or with K positions of a draft."""

    settings: Sequence[Mapping[str, Any]]
    seconds: np.ndarray  # with the rule's own computation
    rounds: np.ndarray
    passes: np.ndarray
    drafted: np.ndarray  # [settings, N, K], rounds that drafted k + 1 tokens
    accepted: np.ndarray  # likewise accepted


class Gain(NamedTuple):
    """Log speed-ups of a group by rule and setting, for the other targets' choices of settings."""

    target: str
    key: Key
    rules: Mapping[str, Sequence[float]]


def recorded(
    config: EvidenceConfig, folder: Path, costs: Mapping[str, CostModel], done: Iterable[Cell]
) -> dict[Key, Texts]:
    """The traces of these cells by group. Raises ValueError for one that has other texts than its group or config."""
    groups: dict[Key, Texts] = {}
    for cell in done:
        trace = load_trace(folder / cell.path)
        model = costs[cell.pair.name].at(temperature=cell.temperature)
        model.pass_times(config.max_draft_length)
        group = groups.setdefault(cell.key, Texts([], [], model))
        first = group.traces[0] if group.traces else trace
        if trace.about["ids"] != first.about["ids"] or trace.max_draft_length < config.max_draft_length:
            raise ValueError(f"{folder / cell.path} holds other prompts than the seed before it, or shorter drafts")
        group.cells.append(cell)
        group.traces.append(trace)
    return groups


def replays_of(texts: Texts, words: str, longest: int) -> Replays:
    """Replays every setting of a rule over all seeds, or ORACLE: the drafts that will be accepted, and no others."""
    rule = None if words == ORACLE else rule_of(words)
    settings, timed, parts = [{}] if rule is None else rule.settings(), texts.costs.at(policy=rule and rule.policy), []
    for trace in texts.traces:
        if rule is None:
            result = oracle(trace, longest)
            by_number = [result.by_length[..., 1:]] * 2
        else:
            result = replay_rule(trace, rule, texts.costs, longest, settings, record=True)
            counts = result.record[..., 0], result.record[..., 1]  # drafted and accepted tokens of every round
            by_number = [np.stack([(each == k + 1).sum(-1, np.int16) for k in range(longest)], -1) for each in counts]
        parts.append((result.seconds(timed), result.rounds, result.passes, *by_number))
    return Replays(settings, *(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))


def choose(
    judged: JudgedRule, key: Key, group: Texts, replays: Mapping[str, Replays], gains: Iterable[Gain]
) -> np.ndarray | None:
    """[N], the setting of every text by `JudgedRule.choice`; None where no other target has been recorded."""
    mine = replays[judged.rule]
    texts = len(group.plain)
    if judged.choice == "default":
        return np.zeros(texts, int)
    if judged.choice == "elsewhere":
        by_target: dict[str, list[Sequence[float]]] = {}
        for gain in gains:
            if gain.target != group.cells[0].pair.target and gain.key[1:] == key[1:] and judged.rule in gain.rules:
                by_target.setdefault(gain.target, []).append(gain.rules[judged.rule])
        if not by_target:
            return None
        return np.full(texts, int(np.argmax(sum(np.mean(each, axis=0) for each in by_target.values()))))
    prompts = texts // len(group.traces)
    first = np.tile(half_of(prompts, 0), len(group.traces))
    chosen = np.zeros(texts, int)
    for half in (first, ~first):
        if judged.choice == "price":
            rate = float(np.max(group.plain[half].sum() / replays[STATIC].seconds[:, half].sum(axis=1)))
            times = group.costs.verification_times(PRICED)
            price = rate * (group.costs.ratio + (times[-1] - times[0]) / PRICED)
            best = np.argmin([abs(each["threshold"] - price) if each else np.inf for each in mine.settings])
        else:
            best = np.argmin(mine.seconds[:, half].sum(axis=1))
        chosen[~half] = int(best)
    return chosen


def rows_of(
    groups: Mapping[Key, Texts], rules: Sequence[JudgedRule], longest: int, before: Iterable[Gain], console: Console
) -> tuple[list[pd.DataFrame], list[pd.DataFrame], list[Gain]]:
    """By group the rows of texts.parquet and rows.parquet, and what was gained here and by the groups of `before`."""
    judged, replays, gains = [*rules, JudgedRule(ORACLE, ORACLE)], {}, [*before]
    words = dict.fromkeys([STATIC, *(rule.rule for rule in judged)])
    for key, group in groups.items():
        replays[key] = {}
        for each in words:
            with console.status(f"{', '.join(map(str, key))}: {each}"):
                replays[key][each] = replays_of(group, each, longest)
        console.print(f"{', '.join(map(str, key))}: {len(words) - 1} rules replayed over {len(group.plain)} texts")
        plain, totals = group.plain.sum(), {rule: each.seconds.sum(axis=1) for rule, each in replays[key].items()}
        logs = {rule: np.log(plain / total).round(5).tolist() for rule, total in totals.items()}
        gains.append(Gain(group.cells[0].pair.target, key, logs))
    texts, rows = [], []
    for key, group in groups.items():
        about = dict(zip(KEYS, key, strict=True)) | {"target": group.cells[0].pair.target}
        columns = [text_columns(cell, trace) for cell, trace in zip(group.cells, group.traces, strict=True)]
        each = pd.concat([pd.DataFrame(about | column) for column in columns])
        texts.append(each)
        rows.append([])
        for rule in judged:
            chosen, mine = choose(rule, key, group, replays[key], gains), replays[key][rule.rule]
            if chosen is None:
                continue
            at = chosen, np.arange(len(each))
            varied = next((key for key in mine.settings[-1] if len({each.get(key) for each in mine.settings}) > 1), "")
            values = np.array([setting.get(varied, np.nan) for setting in mine.settings], np.float64)
            named = {"rule": rule.name, "setting": values[chosen].astype(np.float32)}
            counts = {"seconds": shortened(mine.seconds[at]), "rounds": mine.rounds[at], "passes": mine.passes[at]}
            lists = {"drafted": list(mine.drafted[at]), "accepted": list(mine.accepted[at])}
            rows[-1].append(each[["seed", "kind", "prompt", "tokens"]].assign(**about, **named, **counts, **lists))
    return texts, [*map(pd.concat, rows)], gains


def shortened(values: np.ndarray) -> np.ndarray:
    """float32 with 14 significant bits, which take half of the space."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(fraction * 2**14) / 2**14, exponent).astype(np.float32)


def text_columns(cell: Cell, trace: Trace) -> dict[str, Any]:
    """Of each text the sums over its tokens of the acceptance rate, of AdaEDL's bound, and of the tokens at which the
    bound is above the rate; acceptance is 0 or 1 in greedy decoding, where the bound is that of the raw entropy."""
    within = np.arange(trace.accepted.shape[1]) < trace.length[:, None]
    greedy = cell.temperature == 0
    rate = np.where(within, trace.accepted if greedy else np.nan_to_num(trace.overlap), 0.0)
    entropy = trace.path[..., FEATURES.index("raw_entropy" if greedy else "entropy")]
    bound = np.where(within, np.maximum(1 - np.sqrt(FACTOR * np.maximum(entropy, 0)), 0), 0.0)
    repeated = [repeated_share(trace.tokens[text, : trace.length[text]]) for text in range(trace.num_texts)]
    sums = {"rate": rate, "bound": bound, "above": bound > rate}
    return {
        "seed": cell.seed,
        "kind": trace.about["tasks"],
        "prompt": trace.about["ids"],
        "tokens": trace.length,
        "repeated": shortened(np.asarray(repeated)),
        **{name: shortened(values.sum(axis=1)) for name, values in sums.items()},
    }


@dataclass(frozen=True)
class Build:
    """Make the archive of traces."""

    traces: Positional[Path]
    """The folder that python -m experiments.record configs/evidence.py wrote."""
    config: str = "configs/evidence.py"  # What was recorded.
    live: tuple[Path, ...] = ()  # Folders of experiments.compare; those of other pairs are left out.
    out: Path = FOLDER  # The archive.


def build(options: Build, console: Console) -> None:
    """Replays all rules over the cells that are there and puts them into the archive, beside its other cells. Raises
    ValueError for a pair without costs, or traces that differ in their prompts."""
    enable()
    config: EvidenceConfig = load_config(options.config, experiment="record")
    live, measured = timed_runs(config, options.live)
    every = cells(config)
    done = [cell for cell in every if (options.traces / cell.path).is_file()]
    manifest, frames = read_files(options.out) if (options.out / MANIFEST).is_file() else ({}, {})
    before = {"cells": [], "costs": {}, "gains": [], **manifest}
    if not done and (live.empty or not frames):
        raise FileNotFoundError(f"no trace in {str(options.traces)!r}: python -m experiments.record {options.config}")
    by_path = {each["path"]: each for each in before["cells"]}
    held = {Path(path).parts[0] for path in by_path.keys() - {str(cell.path) for cell in done}}  # have archived seconds
    measured |= {name: cost_model_of(before["costs"][name]) for name in held}
    for name in dict.fromkeys(cell.pair.name for cell in done if cell.pair.name not in held):
        path = options.traces / name / "costs" / "cost_model.json"
        if path.is_file():
            measured[name] = load_cost_model(path)
        elif name not in measured:
            raise ValueError(f"no costs of {name}: python -m experiments.step_cost --out {path.parent}, or --live RUN")
    recordings = recorded(config, options.traces, measured, done)
    gains = [Gain(target, tuple(key), rules) for target, key, rules in before["gains"] if tuple(key) not in recordings]
    texts, rows, gains = rows_of(recordings, config.rules, config.max_draft_length, gains, console)
    facts = {"source": options.config, "config": describe(config), **environment(), "gains": gains}
    facts["pairs"] = {pair.name: describe(pair) for pair in config.pairs}
    facts["costs"] = {pair.name: measured[pair.name]._asdict() for pair in config.pairs if pair.name in measured}
    for group in recordings.values():
        for cell, trace in zip(group.cells, group.traces, strict=True):
            about = {name: trace.about.get(name) for name in ("git", "versions", "processor", "batch")}
            about |= {"texts": trace.num_texts, "tokens": trace.num_positions}
            by_path[str(cell.path)] = {"path": str(cell.path), "sha256": digest(options.traces / cell.path), **about}
    facts["cells"] = [by_path[str(cell.path)] for cell in every if str(cell.path) in by_path]
    facts["missing"] = [str(cell.path) for cell in every if str(cell.path) not in by_path]
    for name, anew in ((TEXTS, texts), (ROWS, rows)):
        archived = [frames[name]] if name in frames else []
        parts = dict(part for frame in [*archived, *anew] for part in frame.groupby([*KEYS, "seed"], observed=True))
        frames[name] = pd.concat([parts[key] for cell in every if (key := (*cell.key, cell.seed)) in parts])
    if not live.empty:  # the pairs' earlier runs go
        earlier = frames.get(LIVE, live[:0])
        frames[LIVE] = pd.concat([earlier[~earlier["pair"].isin(live["pair"])], live])
    archive, simulated = Archive(groups_of(frames[TEXTS], frames[ROWS], facts), frames.get(LIVE, live), facts), {}
    for contrast in config.contrasts:
        totals = archive.totals(contrast.rule, contrast.over, contrast.temperatures, contrast.targets)
        if totals and len(totals) not in simulated:
            simulated[len(totals)] = coverage(totals)
    _write(options.out, frames, facts | {"coverage": simulated})
    size = sum(path.stat().st_size for path in options.out.iterdir())
    console.print(f"{options.out}: {len(facts['cells'])} of {len(every)} cells, {size / 1e6:.2f} MB")


def _write(folder: Path, frames: Mapping[str, pd.DataFrame], facts: Mapping[str, Any]) -> None:
    """The files of an archive, the manifest last; those that are there stay whole until all of them are written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        times = [column for column in frame if frame[column].dtype == np.float32]
        encoding: dict[str, Any] = {"column_encoding": dict.fromkeys(times, "BYTE_STREAM_SPLIT")}
        encoding |= {"compression": "zstd", "compression_level": 19, "use_dictionary": [*frame.columns.drop(times)]}
        frame.to_parquet(folder / f"{name}.new", index=False, **encoding)
    sums = {name: digest(folder / f"{name}.new") for name in frames}
    for name in frames:
        (folder / f"{name}.new").replace(folder / name)
    write_text(folder / MANIFEST, json.dumps({**facts, "sha256": sums}, indent=1) + "\n")


def with_rules(archive: Archive, folder: Path, words: Sequence[str], console: Console) -> Archive:
    """The groups of an archive whose traces are in `folder`, with further rules replayed over them. Raises
    FileNotFoundError without any trace, ValueError for one that is not the archive's, or an unknown rule."""
    config: EvidenceConfig = load_config(archive.manifest["source"], experiment="record")
    sums = {cell["path"]: cell["sha256"] for cell in archive.manifest["cells"]}
    done = [cell for cell in cells(config) if str(cell.path) in sums and (folder / cell.path).is_file()]
    if not done:
        source = archive.manifest["source"]
        raise FileNotFoundError(
            f"none of the archive's traces in {str(folder)!r}: python -m experiments.record {source}"
        )
    for cell in done:
        if digest(folder / cell.path) != sums[str(cell.path)]:
            raise ValueError(f"{folder / cell.path} is not the trace of the archive: its checksum differs")
    costs = {pair: cost_model_of(fields) for pair, fields in archive.manifest["costs"].items()}
    groups = recorded(config, folder, costs, done)
    groups = {key: texts for key, texts in groups.items() if len(texts.traces) == len(archive.groups[key].seeds)}
    rules = {each: rule_of(each) for each in words}
    judged = [JudgedRule(rule.name, each, "here" if rule.grid else "default") for each, rule in rules.items()]
    texts, rows, _ = rows_of(groups, judged, config.max_draft_length, [], console)
    mine = groups_of(pd.concat(texts), pd.concat(rows), archive.manifest)
    for key, group in mine.items():
        group.rules.update(archive.groups[key].rules)
    return archive._replace(groups=mine)


def timed_runs(config: EvidenceConfig, folders: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, CostModel]]:
    """The results of runs of experiments.compare with recorded pairs, and what their passes and rules cost: the passes
    of the run with the fewest doubts, the rules of all."""
    names = {(pair.target, pair.drafter): pair.name for pair in config.pairs}
    parts, models = [], {}
    for folder in folders:
        about = read_manifest(folder)
        name = names.get((about["config"]["target"], about["config"]["drafter"]))
        if name is None:
            continue
        each = pd.DataFrame(read_rows(folder))[list(TIMED)]
        parts.append(each.assign(pair=name, run=folder.name, processor=about["processor"]))
        costs_by_method = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
        models.setdefault(name, []).extend(map(cost_model_of, costs_by_method.values()))
    costs = {}
    for name, each in models.items():
        rules = {rule.policy: rule for model in each for rule in model.rules}
        costs[name] = min(each, key=lambda model: len(model.doubts))._replace(rules=tuple(rules.values()))
    return (pd.concat(parts) if parts else pd.DataFrame()), costs
