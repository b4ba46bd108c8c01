"""The archive of results: its files, and intervals by a hierarchical bootstrap.

rows.parquet has a row for a rule on a text, texts.parquet one for a text, live.parquet one for a timed generation;
manifest.json has versions, costs and the cells that were recorded. Tables need nothing else.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.lib.evidence import Key
from experiments.lib.run_folder import REPOSITORY, write_text
from specdec_jax.costs.cost_model import CostModel, cost_model_of
from specdec_jax.metrics.intervals import LEVEL, Interval

FOLDER = REPOSITORY / "results"
ROWS, TEXTS, LIVE, MANIFEST = "rows.parquet", "texts.parquet", "live.parquet", "manifest.json"
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
                totals.setdefault(target, []).append((np.asarray(times[0]), np.asarray(times[1])))
        return list(totals.values())


def write_archive(folder: Path, frames: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any]) -> None:
    """Writes the files; the manifest has the checksums of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        times = [column for column in frame if frame[column].dtype == np.float32]
        others = [column for column in frame if column not in times]
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "use_dictionary": others}
        frame.to_parquet(
            folder / name, index=False, column_encoding=dict.fromkeys(times, "BYTE_STREAM_SPLIT"), **options
        )
    sums = {name: digest(folder / name) for name in frames}
    write_text(folder / MANIFEST, json.dumps({**manifest, "sha256": sums}, indent=1) + "\n")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_archive(folder: Path = FOLDER) -> Archive:
    """Raises FileNotFoundError for no archive, ValueError for a file that is not the one that was written."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"no archive in {str(folder)!r}: python -m experiments.tables build writes one")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name, expected in manifest["sha256"].items():
        if digest(folder / name) != expected:
            raise ValueError(f"{folder / name} is not the file that was written with {MANIFEST}: its checksum differs")
    frames = {name: pd.read_parquet(folder / name) for name in manifest["sha256"]}
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
