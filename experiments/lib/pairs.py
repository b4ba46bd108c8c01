"""Rules on pairs of models that their settings were not chosen on: one table over all pairs and temperatures."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.lib import trace_runs as runs
from experiments.lib.cells import NONE, markdown
from experiments.lib.rules import STATIC, Rule
from experiments.lib.trace_runs import FORESIGHT, ORACLE, Row, Source, Variant, half_of, replay_rule
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import select
from specdec_jax.stopping import survival

LEFT_OUT = "survival, left out"  # its prior fitted on the other pairs
SAME_PAIR = "survival, prior of the pair"  # fitted on the other half of the prompts
HEAD = ("rule", "here: over static", "worst", "rank", "bound", "elsewhere: over static", "worst", "rank")
NOTE = (
    "Over all pairs and temperatures, by geometric mean over the best static length, whose length is chosen on other "
    "prompts of the same pair. Worst: the largest loss against a cell's fastest rule. Bound: the share of the way from "
    "that static length to foresight, both summed over cells. *Here*: settings chosen on other prompts of the pair. "
    "*Elsewhere*: every rule has the setting that was fastest on the other pairs at that temperature, which is all "
    "that is known of a new pair; losses and ranks are among rules set so. `survival` has no setting; left out, its "
    "prior is fitted on the other pairs alone; *prior of the pair*: on other prompts of the same pair and temperature."
)
Cells = Sequence[tuple[Source, Mapping[str, Row]]]


def left_out(sources: Sequence[Source]) -> Variant:
    """`survival` with a prior of the other pairs' traces, greedy or sampled as the judged one."""

    def replayed(source: Source, longest: int) -> Replay:
        is_sampled = source.temperature > 0
        others = [
            other.trace
            for other in sources
            if other.group != source.group and (other.temperature > 0) == is_sampled and not other.trace.lengths_only
        ]
        prior = {("sampled" if is_sampled else "greedy"): list(fit_prior(*others))} if others else {}
        return replay_rule(source.trace, Rule(LEFT_OUT, survival(**prior)), source.costs, longest)

    return Variant(replayed)


def same_pair(seed: int) -> Variant:
    """`survival` with a prior of the same trace: each half of the prompts has that of the other half."""

    def replayed(source: Source, longest: int) -> Replay:
        kind = "sampled" if source.temperature > 0 else "greedy"
        first = half_of(source.trace.num_texts, seed)
        priors = [list(fit_prior(select(source.trace, np.flatnonzero(half)))) for half in (~first, first)]
        rule = Rule(SAME_PAIR, survival())
        both = replay_rule(source.trace, rule, source.costs, longest, [{kind: prior} for prior in priors])
        at = np.where(first, 0, 1), np.arange(len(first))
        return Replay(*(None if counts is None else counts[at][None] for counts in both))

    return Variant(replayed)


def elsewhere(cells: Cells, source: Source, name: str) -> float | None:
    """A rule's speed-up at the setting that was fastest on the other pairs; None where there are none."""
    others = [
        np.log(rows[name]["curve"])
        for other, rows in cells
        if other.group != source.group and other.temperature == source.temperature and name in rows
    ]
    curve = next(rows for other, rows in cells if other is source)[name]["curve"]
    return float(curve[int(np.argmax(np.sum(others, axis=0)))]) if others else None


def pairs_table(cells: Cells, names: Sequence[str]) -> str:
    """One row per rule; rules that some trace cannot replay are left out."""
    names = [name for name in names if all(name in rows for _, rows in cells)]
    here = {name: [runs.speedup(rows[name]).estimate for _, rows in cells] for name in names}
    there = {name: [elsewhere(cells, source, name) for source, _ in cells] for name in names}
    moved = {name: values for name, values in there.items() if None not in values}
    static = np.array(here[STATIC])
    limit = np.array([runs.speedup(rows.get(FORESIGHT, rows[ORACLE])).estimate for _, rows in cells])
    lines = {}
    for name in names:
        fast = np.array(here[name])
        share = f"{(fast - static).sum() / (limit - static).sum():.0%}"
        lines[name] = [name, *summary(here, name, static), share]
        lines[name] += summary(moved, name, static) if name in moved else [NONE] * 3
    return markdown(list(HEAD), [lines[name] for name in sorted(names, key=lambda name: -np.mean(np.log(here[name])))])


def summary(speeds: Mapping[str, Sequence[float | None]], name: str, static: np.ndarray) -> list[str]:
    """(over static, the worst loss against a cell's fastest, mean rank) of a rule among others."""
    table = np.array([list(values) for values in speeds.values()], float)
    fast = np.array(speeds[name], float)
    ranks = (table > fast).sum(axis=0) + 1
    worst = (fast / table.max(axis=0)).min() - 1
    return [f"{np.exp(np.mean(np.log(fast / static))):.3f}", f"{100 * worst:+.1f} %", f"{ranks.mean():.1f}"]
