"""Replay of stopping policies over a trace, without a model, for many settings at once.

With `rejection` (and in greedy decoding) the rounds of a replay have the distribution of a live run's for every policy,
because a policy sees only the drafter's distributions and the results of its verifications. Greedy rounds equal the
live ones of the same batch, if a policy that weighs costs gets those of the live run's widths, up to ties between the
programs. Limits: block and lossy verifiers accept other tokens; a policy that reads more of a distribution than its
statistics and the drafted token's probability is refused; drafts end with the trace's tails; costs are a model's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.ranges import Between
from specdec_jax.replay.rounds import Counts, Texts, first_rows, replay_pass, texts_of
from specdec_jax.replay.trace import Trace
from specdec_jax.types import PolicyState, StoppingPolicy

BLOCK = 32_768  # maximum rows (settings times texts) of a program


class Replay(NamedTuple):
    """Counts per setting and text, [S, N] int64 unless noted otherwise. Names as in `Statistics`."""

    rounds: np.ndarray
    emitted: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray  # after the end-of-sequence cut
    passes: np.ndarray  # drafter passes
    discarded: np.ndarray  # drafter passes whose distribution gave no token
    by_length: np.ndarray  # [S, N, P+1], rounds by tokens verified after the first
    record: np.ndarray | None  # [S, N, rounds, 4] int16: drafted, accepted, emitted, passes; -1 beyond the last round

    @property
    def tokens_per_round(self) -> np.ndarray:
        """[S] float64, tokens per target pass, over all texts."""
        return self.emitted.sum(axis=1) / self.rounds.sum(axis=1)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """[S] float64, accepted / drafted tokens, over all texts."""
        return self.accepted.sum(axis=1) / np.maximum(self.drafted.sum(axis=1), 1)

    def seconds(self, costs: CostModel) -> np.ndarray:
        """[S, N] float64, decoding time of each text."""
        verifying = self.by_length @ costs.pass_times(self.by_length.shape[-1] - 1)
        return verifying + self.passes * costs.drafter_step

    def total_speedup(self, costs: CostModel) -> np.ndarray:
        """[S] float64, speed-up over plain decoding of all texts."""
        return self.emitted.sum(axis=1) * costs.plain_pass / self.seconds(costs).sum(axis=1)


def replay(
    trace: Trace,
    policy: StoppingPolicy,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    max_draft_length: int | None = None,
    record: bool = False,
    phases: np.ndarray | None = None,
    widest: int | None = None,
) -> Replay:
    """Runs `policy` over every text of a trace, once per setting.

    Args:
        hyperparameters: of `policy.init`; arrays [S] are S settings, scalars apply to all settings, and vector
            hyperparameters of size n have shape [S, n] or [1, n].
        max_draft_length: K, maximum draft length; default: that of the trace.
        record: keep every round.
        widest: maximum verification width, including the token before the draft; default: that of the widest draft.
        phases: [N, T+1] int32 of `phase_path`, for a policy that reads phases.

    Raises:
        ValueError: a policy that reads data that a trace does not have, or phases without any; K larger than the
            trace's, arrays of different lengths, or hyperparameters that `init` refuses.
    """
    if policy.joins_rows:
        raise ValueError(f"{policy.name} decides for the rows of a batch together, and a replay has no batch")
    if policy.needs_phases and phases is None:
        raise ValueError("this policy reads phases: give phases=phase_path(trace, ...)")
    if phases is not None and phases.shape != trace.accepted.shape:
        raise ValueError(f"phases of another trace: shape {phases.shape}, this one's is {trace.accepted.shape}")
    limit = trace.max_draft_length if max_draft_length is None else max_draft_length
    Between(1, trace.max_draft_length, whole=True).check("max_draft_length", limit)
    places = policy.max_tokens(limit) if widest is None else max(widest - 1, limit)
    values = {name: value for name, value in (hyperparameters or {}).items() if value is not None}
    arrays = {name: np.atleast_1d(np.asarray(value)) for name, value in values.items()}
    if len(sizes := {len(value) for value in arrays.values()} - {1}) > 1:
        raise ValueError(f"settings must be one number or as many of each, got {sorted(sizes)}")
    settings = sizes.pop() if sizes else 1
    values = {name: np.broadcast_to(value, (settings, *value.shape[1:])) for name, value in arrays.items()}
    texts = trace.num_texts
    step, rounds = max(1, BLOCK // texts), int(trace.length.max()) if record else 0
    every, program = texts_of(trace, np.arange(texts), phases), _program(policy.bare, limit, places, rounds)
    blocks = []
    for first in range(0, settings, step):
        size = min(step, settings - first)
        repeated = {name: np.repeat(value[first : first + step], texts, axis=0) for name, value in values.items()}
        begun = jax.tree.map(jnp.asarray, policy.init(size * texts, **repeated))
        counts = program(every._replace(text=jnp.tile(every.text, size)), begun)
        blocks.append(jax.tree.map(lambda leaf, n=size: np.asarray(leaf).reshape(n, texts, *leaf.shape[1:]), counts))
    whole: Any = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)
    counts = jax.tree.map(lambda leaf: leaf.astype(np.int64), whole._replace(record=None))
    emitted = np.broadcast_to(trace.length[None, :], (settings, texts)).astype(np.int64)
    return Replay(counts.rounds, emitted, *counts[1:-1], record=whole.record)


def oracle(trace: Trace, max_draft_length: int | None = None) -> Replay:
    """The upper limit of stopping policies: drafts exactly the tokens that will be accepted. One setting."""
    limit = trace.max_draft_length if max_draft_length is None else max_draft_length
    budget = trace.length[:, None] - np.arange(trace.accepted.shape[1]) - 1  # the last token is the target's own
    return rounds_of(trace, np.clip(trace.accepted_runs(), 0, np.clip(budget, 0, limit)), limit)


def rounds_of(trace: Trace, lengths: np.ndarray, longest: int) -> Replay:
    """Rounds whose draft length, at most `longest`, is `lengths` [N, T+1] at their start. One setting."""
    run, texts = trace.accepted_runs(), np.arange(trace.num_texts)
    counts = np.zeros((4, 1, trace.num_texts), np.int64)  # rounds, drafted, accepted, passes
    by_length = np.zeros((1, trace.num_texts, longest + 1), np.int64)
    at = np.zeros(trace.num_texts, int)
    while (going := at < trace.length).any():
        rows = texts[going]
        drafted = lengths[rows, at[rows]]
        accepted = np.minimum(run[rows, at[rows]], drafted)
        emitted = np.minimum(accepted + 1, trace.length[rows] - at[rows])
        counts[:, 0, rows] += np.stack([np.ones_like(drafted), drafted, np.minimum(accepted, emitted), drafted])
        by_length[0, rows, drafted] += 1
        at[rows] += emitted
    rounds, drafted, accepted, passes = counts
    emitted = trace.length[None, :].astype(np.int64)
    return Replay(rounds, emitted, drafted, accepted, passes, np.zeros_like(passes), by_length, None)


@functools.lru_cache(maxsize=64)
def _program(policy: StoppingPolicy, limit: int, places: int, rounds: int) -> Callable[[Texts, PolicyState], Counts]:
    """A compiled replay for a policy's static options; its hyperparameters are arguments."""

    def run(texts: Texts, begun: PolicyState) -> Counts:
        step = functools.partial(replay_pass, policy, texts, limit)
        start = first_rows(texts, begun, places, rounds)
        return lax.while_loop(lambda carry: jnp.any(~carry[0].done), lambda carry: step(*carry), start)[1]

    return jax.jit(run)
