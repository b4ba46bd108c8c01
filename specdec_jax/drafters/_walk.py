"""The stopping policy asked about a draft that is looked up, position by position, as the model drafter asks it.

A looked-up token was chosen, not drawn: its distribution is one-hot, and verification treats it so (`Draft.one_hot`).
One-hot distributions would tell a stopping policy nothing, so what policies see is how likely the token is right: two
outcomes, it or something else, `chance` and 1 - `chance`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Array, Distribution, Draft, DraftInfo, PolicyState, RoundContext, StoppingPolicy

Look = Callable[[Any, Array], tuple[Array, Array, Array]]
# (memory, drafted [B]) -> (token [B] int32, known [B] bool, chance [B] float32); nothing is drafted where not known
Keep = Callable[[Any, Array], Any]  # (memory, token [B]) -> memory, once the token is drafted


class _Walk(NamedTuple):
    step: Array  # [] int32
    going: Array  # [B] bool; a row still going has drafted `step` tokens
    policy: PolicyState
    memory: Any  # of `look`, every leaf [B, ...]
    tokens: Array  # [B, K] int32
    drafted: Array  # [B] int32
    entropy: Array  # [B, K] float32, nats
    max_prob: Array  # [B, K] float32


def check_length(max_draft_length: int) -> None:
    """Raises ValueError below 1."""
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")


def walk(
    policy: StoppingPolicy,
    policy_state: PolicyState,
    context: RoundContext,
    most: int,
    vocab_size: int | None,
    memory: Any,
    look: Look,
    keep: Keep,
) -> tuple[Draft, DraftInfo, PolicyState]:
    """One round's draft of at most `most` (K) tokens. It costs no pass of any model, so `info.passes` is 0."""
    batch = context.length.shape[0]
    context = context._replace(price=jnp.zeros((batch,), jnp.float32))
    begins, begun = policy.begin(policy_state, context)
    unknown = jnp.full((batch, most), jnp.nan, jnp.float32)
    start = _Walk(
        step=jnp.int32(0),
        going=context.alive & (context.budget > 0) & begins,
        policy=select_rows(context.alive, begun, policy_state),
        memory=memory,
        tokens=jnp.zeros((batch, most), jnp.int32),
        drafted=jnp.zeros((batch,), jnp.int32),
        entropy=unknown,
        max_prob=unknown,
    )

    def body(now: _Walk) -> _Walk:
        token, known, chance = look(now.memory, now.drafted)
        going = now.going & known
        distribution = right_or_wrong(token, chance, vocab_size)
        wants, checked = policy.check(now.policy, distribution, now.drafted, context)
        checked = select_rows(going, checked, now.policy)
        drawn = going & wants
        drafted = now.drafted + drawn.astype(jnp.int32)
        goes_on, proceeded = policy.proceed(checked, distribution, token, drafted, context)
        column = jnp.arange(most, dtype=jnp.int32)[None, :] == now.step
        put = lambda buffer, rows, value: jnp.where(column & rows[:, None], value[:, None], buffer)  # noqa: E731
        return _Walk(
            step=now.step + 1,
            going=drawn & goes_on & (drafted < context.budget),
            policy=select_rows(drawn, proceeded, checked),
            memory=select_rows(drawn, keep(now.memory, token), now.memory),
            tokens=put(now.tokens, drawn, token),
            drafted=drafted,
            entropy=put(now.entropy, going, distribution.entropy),
            max_prob=put(now.max_prob, going, distribution.max_prob),
        )

    end = lax.while_loop(lambda now: jnp.any(now.going), body, start)
    free = jnp.zeros((batch,), jnp.int32)
    draft = Draft(end.tokens, None, jnp.ones(end.tokens.shape, bool), end.drafted)
    return draft, DraftInfo(free, free, end.entropy, end.max_prob, free), end.policy


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
