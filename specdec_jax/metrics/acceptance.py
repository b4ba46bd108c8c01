"""Acceptance per task and per draft position with intervals, and the tokens and speed-up that they predict.

The predictions assume independent acceptance at each position (arXiv 2211.17192, section 3): a drafter whose accepted
tokens come in runs, as in real text, is better than predicted at the same mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.metrics.intervals import Interval, bootstrap, ratio_of_totals
from specdec_jax.metrics.judging import Judgement
from specdec_jax.replay.trace import Trace

MACRO = "macro"  # the mean of the tasks, with equal weights


class TaskFigures(NamedTuple):
    """A task's figures, means over its positions with bootstrap intervals over its texts."""

    texts: int
    positions: int
    agreement: Interval  # greedy
    acceptance: dict[float, Interval]  # by temperature


def by_task(judgement: Judgement, tasks: Sequence[str]) -> dict[str, TaskFigures]:
    """Metrics of every task in order of appearance, then of their mean as "macro"; text i belongs to tasks[i].

    Positions have equal weight within a task, and tasks in their mean. Intervals resample texts, for the mean within
    every task. Bounds are NaN if a task has a single text. Raises ValueError if the number of tasks differs from that
    of texts, or one of them is called "macro".
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
        intervals = [ratio_of_totals(column[mine] * size, size) for column in columns]
        result[task] = figures(intervals, int(mine.sum()), int(size.sum()))
    groups = list(members.values())
    means = [mean_of_tasks(column, judgement.positions, groups) for column in columns]
    return result | {MACRO: figures(means, len(tasks), int(judgement.positions.sum()))}


def mean_of_tasks(values: np.ndarray, positions: np.ndarray, groups: Sequence[np.ndarray]) -> Interval:
    """The mean over tasks of their means over positions; values [M] per text, and masks [M] bool, one per task.

    The interval resamples texts within each task: the tasks are fixed.
    """
    weight = positions.astype(np.float64)

    def mean(*texts: np.ndarray, axis: int = -1) -> Any:
        of_tasks = [np.sum((values * weight)[i], axis=axis) / np.sum(weight[i], axis=axis) for i in texts]
        return np.mean(of_tasks, axis=0)

    return bootstrap(tuple(map(np.flatnonzero, groups)), mean, paired=False)


def by_draft(trace: Trace) -> list[Interval]:
    """The acceptance rate of drafts 1, 2, ... of a round, conditional on acceptance of all earlier ones.

    Rounds begin at every position, intervals are over texts. The list ends if no position has a longer draft.
    """
    at, length = np.arange(trace.accepted.shape[1])[None, :], trace.length[:, None]
    run, rates = trace.accepted_runs(), []
    for before in range(trace.max_draft_length):
        reached = (run >= before) & (at + before < length)
        reached_count, accepted = reached.sum(axis=1), (reached & (run > before)).sum(axis=1)
        texts = reached_count > 0
        if not texts.any():
            break
        rates.append(ratio_of_totals(accepted[texts], reached_count[texts]))
    return rates


def expected_tokens(acceptance: Any, draft_length: Any) -> Any:
    """Tokens per target pass: (1 - a^(k+1)) / (1 - a), equation 1 of arXiv 2211.17192; k + 1 where a is 1.

    Acceptance a in [0, 1] and draft length k >= 0 broadcast as numpy does; float64 of their shape. Raises ValueError.
    """
    a, k = np.asarray(acceptance, np.float64), np.asarray(draft_length)
    if not np.all((a >= 0) & (a <= 1)):
        raise ValueError(f"acceptance must lie in [0, 1], got {acceptance!r}")
    if k.dtype.kind not in "iu" or np.any(k < 0):
        raise ValueError(f"draft_length must be a whole number, not negative, got {draft_length!r}")
    safe = np.where(a < 1, a, 0.5)
    return np.where(a < 1, (1 - safe ** (k + 1)) / (1 - safe), k + 1)[()]


def expected_speedup(acceptance: Any, draft_length: Any, cost_ratio: Any) -> Any:
    """Speed-up over plain decoding: expected_tokens / (k c + 1), theorem 3.8 of arXiv 2211.17192.

    `cost_ratio` c >= 0 is the time of a drafter step relative to a target pass; a pass over k + 1 tokens is assumed to
    take as long as one over a single token. All three broadcast. Raises ValueError.
    """
    c = np.asarray(cost_ratio, np.float64)
    if not np.all(c >= 0) or not np.all(np.isfinite(c)):
        raise ValueError(f"cost_ratio must be finite and not negative, got {cost_ratio!r}")
    return (expected_tokens(acceptance, draft_length) / (np.asarray(draft_length) * c + 1))[()]


def best_draft_length(acceptance: float, cost_ratio: float, longest: int = 32) -> int:
    """The static draft length up to `longest` with the largest expected speed-up, the first if tied; 0: no drafts."""
    if longest < 0:
        raise ValueError(f"longest must not be negative, got {longest!r}")
    return int(np.argmax(expected_speedup(acceptance, np.arange(longest + 1), cost_ratio)))
