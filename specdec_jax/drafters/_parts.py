"""Parts of drafters: functions of those without state, and lookup as a source of the draft loop.

With it stopping policies work as with a draft model.

A looked-up token is chosen, not drawn: its distribution is one-hot in verification (`Draft.one_hot`). A one-hot
distribution has no information for a stopping policy, so policies see an estimate that the token is right: two
outcomes, this token or another one, with probabilities `chance` and 1 - `chance`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Array, Distribution, DrafterState, Next, Params, Source

# (memory, drafted) -> (token [B] int32, known [B] bool, chance [B] float32); nothing is drafted where `known` is False.
Retrieve = Callable[[Any, Array], tuple[Array, Array, Array]]
Remember = Callable[[Any, Array], Any]  # the memory after `token` [B] was drafted


def lookup(
    state: DrafterState,
    retrieve: Retrieve,
    vocab_size: int | None,
    memory: Any = (),
    remember: Remember = lambda memory, token: memory,
) -> Source:
    """A source without passes or draws; `state` is unchanged. Raises ValueError if `retrieve` returns no triple."""

    def predict(memory: Any, drafted: Array, uniform: Array) -> tuple[Next, Any]:
        answer = retrieve(memory, drafted)
        if len(answer) != 3:
            raise ValueError(f"retrieve must give (token, known, chance), [B] each, and gave {len(answer)} values")
        token, available, chance = answer
        return Next(right_or_wrong(token, chance, vocab_size), token, available), memory

    def keep(memory: Any, token: Array, is_drafted: Array, drafted: Array) -> Any:
        return select_rows(is_drafted, remember(memory, token), memory)

    return Source(lambda going: memory, predict, keep, lambda drafted: (state, drafted), cost=0.0, chosen=True)


def right_or_wrong(token: Array, chance: Array, vocab_size: int | None) -> Distribution:
    """The distribution that policies see for a looked-up token: probability `chance` [B], the rest for other tokens.

    Entropy (nats) and margin are those of the two outcomes, independent of the vocabulary size. For `chance` below 1/2
    the entropy is -log(chance), the minimum entropy of a distribution with that largest probability; the entropy of two
    outcomes would decrease there. `log_prob` distributes the rest uniformly. Without `vocab_size` it is None, so that a
    policy that reads it fails at tracing instead of using wrong values.
    """
    rest = 1.0 - chance
    entropy = -jnp.where(chance > 0, chance * jnp.log(chance), 0.0) - jnp.where(rest > 0, rest * jnp.log(rest), 0.0)
    entropy = jnp.where(chance < 0.5, -jnp.log(chance), entropy)
    margin = jnp.maximum(chance - rest, 0.0)
    log_prob: Any = None
    if vocab_size is not None:
        hit = jnp.arange(vocab_size, dtype=jnp.int32)[None, :] == token[:, None]
        log_prob = jnp.log(jnp.where(hit, chance[:, None], rest[:, None] / max(vocab_size - 1, 1)))
    return Distribution(log_prob, token, entropy, chance, margin, entropy, chance)


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """An empty state."""
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """Return the state unchanged."""
    return state
