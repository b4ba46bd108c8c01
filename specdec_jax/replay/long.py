"""A long run from one state: the policy's state is carried from text to text of a trace.

This corresponds to a decoder that passes the policy's state of one request to the next, and is as exact as a replay:
every text begins and ends like a request, with its own budget. It differs from one long text: at the beginning of each
text the context is a new prompt. A text that occurs twice in the order has the same random outcomes twice.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.decoder import widest_draft
from specdec_jax.replay.rounds import (
    Counts,
    Rows,
    Texts,
    as_settings,
    check_replayed,
    first_rows,
    most_drafts,
    replay_pass,
    texts_of,
)
from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.types import Array, PolicyState, StoppingPolicy

ENTROPY = FEATURES.index("entropy")


class LongRun(NamedTuple):
    """Values per round, [S, R]; beyond a setting's last round position is -1 and other values are meaningless."""

    position: np.ndarray  # int64, tokens emitted before the round, over all texts
    drafted: np.ndarray  # int64
    accepted: np.ndarray  # int64
    passes: np.ndarray  # int64, drafter passes
    entropy: np.ndarray  # float64, nats, mean over the round's drafter passes; NaN without any
    threshold: np.ndarray  # float32, the policy's, before its update
    tokens: int  # total number of emitted tokens

    @property
    def rounds(self) -> np.ndarray:
        """Number of rounds, [S] int64."""
        return (self.position >= 0).sum(axis=1)


def long_replay(
    trace: Trace,
    policy: StoppingPolicy,
    hyperparameters: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
    *,
    max_draft_length: int | None = None,
) -> LongRun:
    """Replays the texts one after the other, carrying the policy's state; all settings at once.

    Args:
        hyperparameters: of `policy.init`; arrays [S] are S settings.
        order: indices of texts, with any repetitions; default: each once in the trace's order.

    Raises:
        ValueError: as `replay`; a policy that reads phases; or no texts.
    """
    check_replayed(policy, trace)
    if policy.needs_phases:
        raise ValueError("a long run knows no phases, which this policy reads; replay takes them")
    limit = most_drafts(trace, max_draft_length)
    texts = list(range(trace.num_texts) if order is None else order)
    if not texts:
        raise ValueError("a long run needs at least one text")
    values, settings = as_settings(hyperparameters or {})
    state = jax.tree.map(jnp.asarray, policy.init(settings, **values))
    every = texts_of(trace, np.zeros(settings))
    program = _program(policy.bare, limit, int(trace.length.max()))
    parts, emitted = [], 0
    for text in texts:
        repeated = every._replace(text=jnp.full((settings,), text, jnp.int32))
        record, threshold, state = program(repeated, state)
        parts.append(_rounds(trace, text, np.asarray(record, np.int64), np.asarray(threshold), emitted))
        emitted += int(trace.length[text])
    whole = [np.concatenate(leaves, axis=1) for leaves in zip(*(part[:-1] for part in parts), strict=True)]
    played = whole[0] >= 0  # each setting's rounds are moved together
    moved = np.argsort(~played, axis=1, kind="stable")[:, : int(played.sum(axis=1).max())]
    return LongRun(*(np.take_along_axis(leaf, moved, axis=1) for leaf in whole), tokens=emitted)


@functools.lru_cache(maxsize=16)
def _program(policy: StoppingPolicy, limit: int, rounds: int) -> Callable[..., tuple[Array, Array, PolicyState]]:
    """A program that replays one text from a state: its rounds [S, rounds, 4], thresholds [S, rounds], new state."""

    def run(texts: Texts, begun: PolicyState) -> tuple[Array, Array, PolicyState]:
        size = texts.text.shape[0]
        rows, counts = first_rows(texts, begun, widest_draft(policy, limit), rounds)
        seen = jnp.full((size, rounds), jnp.nan, jnp.float32)

        def step(carry: tuple[Rows, Counts, Array]) -> tuple[Rows, Counts, Array]:
            rows, counts, seen = carry
            index = jnp.where(rows.done, rounds, counts.rounds)
            seen = seen.at[jnp.arange(size), index].set(policy.threshold(rows.policy), mode="drop")
            rows, counts = replay_pass(policy, texts, limit, rows, counts)
            return rows, counts, seen

        rows, counts, seen = lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, (rows, counts, seen))
        assert counts.record is not None  # created by first_rows
        return counts.record, seen, rows.policy

    return jax.jit(run)


def _rounds(trace: Trace, text: int, record: np.ndarray, threshold: np.ndarray, before: int) -> LongRun:
    """The rounds of one text; the distributions that were used are read from the trace again."""
    drafted, accepted, emitted, passes = np.moveaxis(record, 2, 0)
    played = drafted >= 0
    at = np.cumsum(np.where(played, emitted, 0), axis=1) - np.where(played, emitted, 0)
    last = trace.path.shape[1] - 1
    total = np.zeros(at.shape)
    for index in range(trace.max_draft_length):
        looked = played & (index < passes)
        if trace.chains is not None:
            total += np.where(looked, trace.chains[text, np.minimum(at, last), index, ENTROPY], 0.0)
            continue
        on_path = trace.path[text, np.minimum(at + index, last), ENTROPY]
        # The first distribution after the accepted tokens is on the path; those after a rejected token are in its tail.
        rejected = trace.tail_of[text, np.minimum(at + accepted, last)]
        beyond = trace.tails[rejected, np.clip(index - accepted, 0, trace.max_draft_length - 1), ENTROPY]
        total += np.where(looked, np.where(index <= accepted, on_path, beyond), 0.0)
    entropy = np.where(passes > 0, total / np.maximum(passes, 1), np.nan)
    position = np.where(played, before + at, -1)
    return LongRun(position, drafted, accepted, passes, entropy, threshold, 0)


def at_positions(run: LongRun, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The values [S, P], from `values` [S, R], of the rounds into which the positions [P] fall."""
    values_of_rows = []
    for row, count in enumerate(run.rounds):
        index = np.searchsorted(run.position[row, :count], positions, side="right") - 1
        values_of_rows.append(values[row, index])
    return np.stack(values_of_rows)


def forgotten(run: LongRun, within: float = 0.01) -> int | None:
    """The first position from which the thresholds of all settings stay `within` each other; None: there is none.

    Positions are compared instead of rounds, because settings that draft differently have different rounds.
    """
    positions = np.arange(run.tokens)
    apart = np.ptp(at_positions(run, run.threshold, positions), axis=0) > within
    if apart[-1]:
        return None
    return int(np.flatnonzero(apart)[-1]) + 1 if apart.any() else 0
