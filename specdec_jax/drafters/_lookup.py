"""Drafts that are looked up, as a source of the draft loop: stopping policies are asked as about a model's drafts.

A looked-up token was chosen, not drawn: its distribution is one-hot, and verification treats it so (`Draft.one_hot`).
One-hot distributions would tell a stopping policy nothing, so what policies see is how likely the token is right: two
outcomes, it or something else, `chance` and 1 - `chance`.
"""

from typing import Any, Protocol

import jax.numpy as jnp

from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Array, Distribution, DrafterState, Next, Source


class Retrieve(Protocol):
    """Gives (token [B] int32, known [B] bool, chance [B] float32); nothing is drafted where not known."""

    def __call__(self, memory: Any, drafted: Array, /) -> tuple[Array, Array, Array]: ...


class Remember(Protocol):
    """The memory once `token` [B] is drafted."""

    def __call__(self, memory: Any, token: Array, /) -> Any: ...


def lookup(
    state: DrafterState,
    retrieve: Retrieve,
    vocab_size: int | None,
    memory: Any = (),
    remember: Remember = lambda memory, token: memory,
) -> Source:
    """A source without passes, that never reads a uniform: nothing is drawn. The loop leaves `state` as it was."""

    def predict(memory: Any, drafted: Array, uniform: Array) -> tuple[Next, Any]:
        answer = retrieve(memory, drafted)
        if len(answer) != 3:
            raise ValueError(f"retrieve must give (token, known, chance), [B] each, and gave {len(answer)} values")
        token, available, chance = answer
        return Next(right_or_wrong(token, chance, vocab_size), token, available), memory

    def keep(memory: Any, token: Array, is_drafted: Array, drafted: Array) -> Any:
        del drafted
        return select_rows(is_drafted, remember(memory, token), memory)

    return Source(lambda going: memory, predict, keep, lambda drafted: (state, drafted), cost=0.0, chosen=True)


def right_or_wrong(token: Array, chance: Array, vocab_size: int | None) -> Distribution:
    """What policies see of a looked-up token: probability `chance` [B] for it, the rest for something else.

    Entropy (nats) and margin are of these two outcomes: how many wrong tokens there are says nothing about how likely
    the token is wrong. Below chance 1/2 the entropy is -log(chance), the least that a distribution with that largest
    probability has: two outcomes would be ever more certain there, of the wrong one. `log_prob` spreads the rest
    evenly. Without a vocabulary's size it is None, so that a rule that reads it fails when it is traced and not with
    wrong numbers.
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
