"""The archive made of traces: rules replayed over every cell, with the setting that is chosen on other texts."""

import itertools
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
from experiments.lib.archive import FOLDER, KEYS, LIVE, ROWS, TEXTS, Archive, coverage, digest, groups_of, write_archive
from experiments.lib.evidence import Cell, Key, cells
from experiments.lib.rules import STATIC, Rule, rule_in
from experiments.lib.run_folder import environment, read_manifest, read_rows
from experiments.lib.tables import TIMED_COLUMNS
from experiments.lib.trace_runs import half_of, replay_rule
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.cost_model import CostModel, cost_model_of, load_cost_model
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.replay.replay import oracle
from specdec_jax.replay.trace import FEATURES, Trace, load_trace

PRICED = 8  # drafts over which the price takes the slope of the verification times
FACTOR = 0.2  # AdaEDL's entropy factor
ORACLE = "oracle"
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


class Played(NamedTuple):
    """A rule's settings over the texts of a group, [settings, N] or with K positions of a draft."""

    settings: Sequence[Mapping[str, Any]]
    seconds: np.ndarray  # with the rule's own computation
    rounds: np.ndarray
    passes: np.ndarray
    drafted: np.ndarray  # [settings, N, K], rounds that drafted k + 1 tokens
    accepted: np.ndarray  # likewise accepted


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


def play(texts: Texts, rule: Rule, longest: int) -> Played:
    """Replays every setting of a rule over all seeds."""
    settings = rule.settings()
    timed = texts.costs.at(policy=rule.policy)
    parts = []
    for trace in texts.traces:
        result = replay_rule(trace, rule, texts.costs, longest, settings, record=True)
        assert result.record is not None
        counts = result.record[..., 0], result.record[..., 1]  # drafted and accepted tokens of every round
        by_number = [np.stack([(each == k + 1).sum(-1, np.int16) for k in range(longest)], -1) for each in counts]
        parts.append((result.seconds(timed), result.rounds, result.passes, *by_number))
    return Played(settings, *(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))


def play_oracle(texts: Texts, longest: int) -> Played:
    """The drafts that will be accepted, and no others."""
    results = [oracle(trace, longest) for trace in texts.traces]
    parts = [(each.seconds(texts.costs), each.rounds, each.passes, *[each.by_length[..., 1:]] * 2) for each in results]
    return Played([{}], *(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))


def choose(
    judged: JudgedRule, key: Key, groups: Mapping[Key, Texts], played: Mapping[Key, Mapping[str, Played]]
) -> np.ndarray | None:
    """[N], the setting of every text by `JudgedRule.choice`; None where no other target has been recorded."""
    group, mine = groups[key], played[key][judged.rule]
    texts = len(group.plain)
    if judged.choice == "default":
        return np.zeros(texts, int)
    if judged.choice == "elsewhere":
        gains: dict[str, list[np.ndarray]] = {}
        for other, texts_there in groups.items():
            target = texts_there.cells[0].pair.target
            if other[1:] == key[1:] and target != group.cells[0].pair.target:
                seconds = played[other][judged.rule].seconds.sum(axis=1)
                gains.setdefault(target, []).append(np.log(texts_there.plain.sum() / seconds))
        if not gains:
            return None
        return np.full(texts, int(np.argmax(sum(np.mean(each, axis=0) for each in gains.values()))))
    prompts = texts // len(group.traces)
    first = np.tile(half_of(prompts, 0), len(group.traces))
    chosen = np.zeros(texts, int)
    for half in (first, ~first):
        if judged.choice == "price":
            rate = float(np.max(group.plain[half].sum() / played[key][STATIC].seconds[:, half].sum(axis=1)))
            times = group.costs.verification_times(PRICED)
            price = rate * (group.costs.ratio + (times[-1] - times[0]) / PRICED)
            best = np.argmin([abs(each["threshold"] - price) if each else np.inf for each in mine.settings])
        else:
            best = np.argmin(mine.seconds[:, half].sum(axis=1))
        chosen[~half] = int(best)
    return chosen


def rows_of(
    config: EvidenceConfig, groups: Mapping[Key, Texts], rules: Sequence[JudgedRule], console: Console
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The columns of texts.parquet and rows.parquet."""
    longest, played = config.max_draft_length, {}
    for key, group in groups.items():
        words = dict.fromkeys([STATIC, *(judged.rule for judged in rules)])
        played[key] = {}
        for each in words:
            with console.status(f"{', '.join(map(str, key))}: {each}"):
                played[key][each] = play(group, rule_in(each), longest)
        console.print(f"{', '.join(map(str, key))}: {len(words)} rules replayed over {len(group.plain)} texts")
    texts, rows = [], []
    for key, group in groups.items():
        about = dict(zip(KEYS, key, strict=True)) | {"target": group.cells[0].pair.target}
        columns = [text_columns(cell, trace) for cell, trace in zip(group.cells, group.traces, strict=True)]
        each = pd.concat([pd.DataFrame(about | column) for column in columns])
        texts.append(each)
        judged = [(rule.name, choose(rule, key, groups, played), played[key][rule.rule]) for rule in rules]
        judged.append((ORACLE, np.zeros(len(each), int), play_oracle(group, longest)))
        for name, chosen, mine in judged:
            if chosen is None:
                continue
            at = chosen, np.arange(len(each))
            varied = next((key for key in mine.settings[-1] if len({each.get(key) for each in mine.settings}) > 1), "")
            values = np.array([setting.get(varied, np.nan) for setting in mine.settings], np.float64)
            counts = {"rounds": mine.rounds[at], "passes": mine.passes[at]}
            lists = {"drafted": list(mine.drafted[at]), "accepted": list(mine.accepted[at])}
            named = {"rule": name, "setting": values[chosen].astype(np.float32), "seconds": shortened(mine.seconds[at])}
            rows.append(each[["seed", "kind", "prompt", "tokens"]].assign(**about, **named, **counts, **lists))
    return pd.concat(texts), pd.concat(rows)


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


def cell_facts(folder: Path, groups: Mapping[Key, Texts]) -> list[dict[str, Any]]:
    """What the manifest says of every cell that was recorded."""
    facts = []
    for cell, trace in itertools.chain(*(zip(group.cells, group.traces, strict=True) for group in groups.values())):
        about = {name: trace.about.get(name) for name in ("git", "versions", "processor", "batch")}
        size = {"texts": trace.num_texts, "tokens": trace.num_positions}
        facts.append({"path": str(cell.path), "sha256": digest(folder / cell.path), **size, **about})
    return facts


@dataclass(frozen=True)
class Build:
    """Make the archive of traces."""

    traces: Positional[Path]
    """The folder that python -m experiments.record configs/evidence.py wrote."""
    config: str = "configs/evidence.py"  # What was recorded.
    live: tuple[Path, ...] = ()  # Folders of experiments.compare; those of other pairs are left out.
    out: Path = FOLDER  # The archive.


def build(options: Build, console: Console) -> None:
    """Replays all rules over the cells that are there and writes the archive. Raises ValueError for a pair without
    costs, or traces that differ in their prompts."""
    enable()
    config: EvidenceConfig = load_config(options.config, experiment="record")
    live, measured = timed_runs(config, options.live)
    every = cells(config)
    done = [cell for cell in every if (options.traces / cell.path).is_file()]
    if not done:
        raise FileNotFoundError(f"no trace in {str(options.traces)!r}: python -m experiments.record {options.config}")
    for name in dict.fromkeys(cell.pair.name for cell in done):
        path = options.traces / name / "costs" / "cost_model.json"
        if path.is_file():
            measured[name] = load_cost_model(path)
        elif name not in measured:
            raise ValueError(f"no costs of {name}: python -m experiments.step_cost --out {path.parent}, or --live RUN")
    recordings = recorded(config, options.traces, measured, done)
    texts, rows = rows_of(config, recordings, config.rules, console)
    facts = {"source": options.config, "config": describe(config), **environment()}
    facts["pairs"] = {pair.name: describe(pair) for pair in config.pairs}
    facts["costs"] = {name: model._asdict() for name, model in measured.items()}
    facts["cells"] = cell_facts(options.traces, recordings)
    facts["missing"] = [str(cell.path) for cell in every if cell not in done]
    frames = {ROWS: rows, TEXTS: texts} | ({} if live.empty else {LIVE: live})
    archive, simulated = Archive(groups_of(texts, rows, facts), live, facts), {}
    for contrast in config.contrasts:
        totals = archive.totals(contrast.rule, contrast.over, contrast.temperatures, contrast.targets)
        if totals and len(totals) not in simulated:
            simulated[len(totals)] = coverage(totals)
    write_archive(options.out, frames, facts | {"coverage": simulated})
    size = sum(path.stat().st_size for path in options.out.iterdir())
    console.print(f"{options.out}: {len(done)} of {len(every)} cells, {len(rows)} rows, {size / 1e6:.2f} MB")


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
    rules = [rule_in(each) for each in words]
    judged = [
        JudgedRule(rule.name, each, "here" if rule.grid else "default") for rule, each in zip(rules, words, strict=True)
    ]
    mine = groups_of(*rows_of(config, groups, judged, console), archive.manifest)
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
