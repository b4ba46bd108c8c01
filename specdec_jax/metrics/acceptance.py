"""What acceptance is worth: figures a task and a draft with intervals, and the tokens and the speed-up they predict.

The predictions take acceptance as independent of the position (arXiv 2211.17192, section 3): a drafter whose hits come
in runs, as they do on real text, does better than they say at the same mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.metrics.intervals import Interval, bootstrap, ratio_of_totals
from specdec_jax.metrics.judging import Judgement
from specdec_jax.replay.trace import Trace

MACRO = "macro"  # the mean of the tasks, each counting the same


class TaskFigures(NamedTuple):
    """A task's figures, means over its positions with bootstrap intervals over its texts."""

    texts: int
    positions: int
    agreement: Interval  # greedy
    acceptance: dict[float, Interval]  # by temperature


def by_task(
    judgement: Judgement, tasks: Sequence[str], *, level: float = 0.95, seed: int = 0
) -> dict[str, TaskFigures]:
    """Figures of every task in order of appearance, then of their mean as "macro"; text i belongs to tasks[i].

    Positions weigh the same within a task, tasks the same in their mean. Texts are what is resampled, for the mean
    within every task. Bounds are NaN where a task has a single text. Raises ValueError: as many tasks as texts are
    needed, none of them called "macro".
    """
    if len(tasks) != len(judgement.positions) or not len(tasks) or MACRO in tasks:
        raise ValueError(
            f"judging by task needs a task for each of {len(judgement.positions)} texts and none called {MACRO!r}, "
            f"got {len(tasks)}: {sorted(set(tasks))}"
        )
    members = {task: np.array([name == task for name in tasks]) for task in dict.fromkeys(tasks)}
    columns = [judgement.agreement, *judgement.acceptance.T]

    def figures(intervals: Sequence[Interval], texts: int, positions: int) -> TaskFigures:
        acceptance = dict(zip(judgement.temperatures, intervals[1:], strict=True))
        return TaskFigures(texts, positions, intervals[0], acceptance)

    result = {}
    for task, mine in members.items():
        size = judgement.positions[mine]
        intervals = [ratio_of_totals(column[mine] * size, size, level, seed) for column in columns]
        result[task] = figures(intervals, int(mine.sum()), int(size.sum()))
    groups = list(members.values())
    means = [mean_of_tasks(column, judgement.positions, groups, level, seed) for column in columns]
    return result | {MACRO: figures(means, len(tasks), int(judgement.positions.sum()))}


def mean_of_tasks(
    values: np.ndarray, positions: np.ndarray, groups: Sequence[np.ndarray], level: float = 0.95, seed: int = 0
) -> Interval:
    """The mean over tasks of their means over positions; values [M] a text, groups of bool [M], one a task.

    The interval resamples texts within each task: which tasks there are is not chance.
    """
    weight = positions.astype(np.float64)

    def mean(*texts: np.ndarray, axis: int = -1) -> Any:
        of_tasks = [np.sum((values * weight)[i], axis=axis) / np.sum(weight[i], axis=axis) for i in texts]
        return np.mean(of_tasks, axis=0)

    return bootstrap(tuple(map(np.flatnonzero, groups)), mean, level, seed, paired=False)


def by_draft(trace: Trace, *, level: float = 0.95, seed: int = 0) -> list[Interval]:
    """The share of drafts 1, 2, ... of a round that is accepted where all before it were, total over total.

    Rounds begin at every position, intervals are over texts. The list ends where no position has a longer draft.
    """
    at, length = np.arange(trace.accepted.shape[1])[None, :], trace.length[:, None]
    run, rates = trace.accepted_runs(), []
    for before in range(trace.max_draft_length):
        reached = (run >= before) & (at + before < length)
        reached_count, accepted = reached.sum(axis=1), (reached & (run > before)).sum(axis=1)
        texts = reached_count > 0
        if not texts.any():
            break
        rates.append(ratio_of_totals(accepted[texts], reached_count[texts], level, seed))
    return rates


def expected_tokens(acceptance: Any, draft_length: Any) -> Any:
    """Tokens a target pass emits: (1 - a^(k+1)) / (1 - a), equation 1 of arXiv 2211.17192; k + 1 where a is 1.

    Acceptance a in [0, 1] and draft length k >= 0 broadcast as numpy does; float64 of their shape. Raises ValueError.
    """
    a, k = _checked(acceptance, draft_length)
    safe = np.where(a < 1, a, 0.5)
    return np.where(a < 1, (1 - safe ** (k + 1)) / (1 - safe), k + 1)[()]


def expected_speedup(acceptance: Any, draft_length: Any, cost_ratio: Any) -> Any:
    """Over plain decoding: expected_tokens / (k c + 1), theorem 3.8 of arXiv 2211.17192.

    `cost_ratio` c >= 0 is a drafter step's time over a target pass's; a pass that verifies k + 1 tokens is taken to
    cost what a pass of one does. All three broadcast. Raises ValueError.
    """
    c = np.asarray(cost_ratio, np.float64)
    if not np.all(c >= 0) or not np.all(np.isfinite(c)):
        raise ValueError(f"cost_ratio must be finite and not negative, got {cost_ratio!r}")
    return (expected_tokens(acceptance, draft_length) / (np.asarray(draft_length) * c + 1))[()]


def best_draft_length(acceptance: float, cost_ratio: float, longest: int = 32) -> int:
    """The static draft length up to `longest` with the largest expected speed-up, the least of equals; 0: no drafts."""
    if longest < 0:
        raise ValueError(f"longest must not be negative, got {longest!r}")
    return int(np.argmax(expected_speedup(acceptance, np.arange(longest + 1), cost_ratio)))


def _checked(acceptance: Any, draft_length: Any) -> tuple[np.ndarray, np.ndarray]:
    a, k = np.asarray(acceptance, np.float64), np.asarray(draft_length)
    if not np.all((a >= 0) & (a <= 1)):
        raise ValueError(f"acceptance must lie in [0, 1], got {acceptance!r}")
    if k.dtype.kind not in "iu" or np.any(k < 0):
        raise ValueError(f"draft_length must be a whole number, not negative, got {draft_length!r}")
    return a, k
