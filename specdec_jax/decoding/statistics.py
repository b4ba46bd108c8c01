"""Counts of rounds and tokens inside the decoding loop. Names as in vLLM; `summaries.py` derives metrics from them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.hyperparameters import host
from specdec_jax.types import Array, RoundInfo, Statistics


def no_counts(batch: int, longest: int) -> Statistics:
    """Zero counts for `batch` rows and drafts of at most `longest` tokens."""
    sizes = {"drafted_at": (longest,), "evaluated_at": (longest,), "accepted_at": (longest,)}
    sizes["length_histogram"] = (longest + 1,)
    return Statistics(*(host(np.zeros((batch, *sizes.get(name, ())), np.int32)) for name in Statistics._fields))


def count_round(counts: Statistics, alive: Array, now: RoundInfo) -> Statistics:
    """The counts including one more round; accepted and emitted tokens are those after the end-of-sequence cut."""
    longest = now.proposed.shape[1]
    index = jnp.arange(longest, dtype=jnp.int32)[None, :]
    drafted = (index < now.drafted[:, None]) & alive[:, None]
    increment = alive.astype(jnp.int32)
    histogram = jnp.arange(longest + 1, dtype=jnp.int32)[None, :] == now.accepted[:, None]
    added = Statistics(
        num_rounds=increment,
        num_drafts=increment * (now.drafted > 0).astype(jnp.int32),
        num_draft_tokens=increment * now.drafted,
        num_accepted_tokens=increment * now.accepted,
        num_emitted_tokens=now.emitted,
        drafter_passes=increment * now.drafter_passes,
        discarded_passes=increment * now.discarded,
        drafted_at=drafted.astype(jnp.int32),
        evaluated_at=(drafted & (index < jnp.minimum(now.emitted, now.accepted + 1)[:, None])).astype(jnp.int32),
        accepted_at=(drafted & (index < now.accepted[:, None])).astype(jnp.int32),
        length_histogram=(histogram & alive[:, None]).astype(jnp.int32),
        num_reasoning_tokens=now.emitted * now.phase,
    )
    return jax.tree.map(jnp.add, counts, added)


def no_record(batch: int, longest: int, rounds: int) -> RoundInfo | None:
    """An empty record of `rounds` rounds, or None for 0."""
    if rounds == 0:
        return None
    each = dict.fromkeys(RoundInfo._fields, host(np.zeros((batch, rounds), np.int32)))
    each |= dict.fromkeys(("entropy", "max_prob"), host(np.full((batch, rounds, longest), np.nan, np.float32)))
    each["proposed"] = host(np.zeros((batch, rounds, longest), np.int32))
    return RoundInfo(**each | {"threshold": host(np.full((batch, rounds), np.nan, np.float32))})


def record_round(record: RoundInfo | None, round_index: Array, alive: Array, now: RoundInfo) -> RoundInfo | None:
    """The record with this round written. Unfinished rows are all at the same round; finished rows write nothing."""
    if record is None:
        return None
    index = jnp.max(jnp.where(alive, round_index, 0))

    def write(buffer: Array, value: Array) -> Array:
        old = lax.dynamic_index_in_dim(buffer, index, axis=1, keepdims=False)
        mask = alive.reshape(alive.shape + (1,) * (value.ndim - 1))
        return lax.dynamic_update_index_in_dim(buffer, jnp.where(mask, value, old), index, axis=1)

    return jax.tree.map(write, record, now)
