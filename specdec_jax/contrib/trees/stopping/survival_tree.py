"""`survival` with siblings: fills the verification width with siblings, and uses a wider one where that pays.

The draft at depth d is the first rejected one with probability S_d (1 - a_d), and its i-th sibling is then accepted
with probability (1 - h_1) ... (1 - h_(i-1)) h_i, each a gain of one token. The best n siblings are verified, with the
n for which their value exceeds R (V(k + n) - V(k)) most. For the rest see stopping/survival.py (SpecDec++, arXiv
2405.19715), for measurements docs/combs.md. Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.ranges import Between
from specdec_jax.stopping._readings import remember
from specdec_jax.stopping.survival import (
    FURTHER,
    SurvivalState,
    expected,
    learn,
    net_by_row,
    rate_of,
    survival,
    survival_with,
    time_of,
)
from specdec_jax.strategy import defaults_of, strategy
from specdec_jax.types import Array, RoundContext

# h of the second, third and fourth candidate, for smollm2 and smollm2-drafter-reading (docs/combs.md).
GREEDY_SIBLINGS, SAMPLED_SIBLINGS = (0.28, 0.2, 0.17), (0.23, 0.13, 0.1)
Shares = Annotated[Any, Between(0, 1, entries=len(GREEDY_SIBLINGS))]


class SurvivalTreeState(NamedTuple):
    policy: SurvivalState
    greedy_siblings: Array  # [B, M] float32, h
    sampled_siblings: Array  # [B, M]


@strategy
def survival_tree(
    positions: Annotated[int, Between(1)] = 32, siblings: Annotated[int, Between(1, len(GREEDY_SIBLINGS))] = 3
) -> TreePolicy:
    """Draft while it pays, and verify the siblings that pay.

    Args:
        positions: maximum tokens of a pass (P): drafts and siblings.
        siblings: maximum verified siblings of a draft (M), 1 to 3.

    Hyperparameters (`init`): those of `survival`, greedy_siblings and sampled_siblings (h of the second, third and
    fourth candidate).
    """
    chain = survival(positions)

    def init(
        batch: int,
        greedy_siblings: Shares = GREEDY_SIBLINGS,
        sampled_siblings: Shares = SAMPLED_SIBLINGS,
        **hyperparameters: Any,
    ) -> SurvivalTreeState:
        return SurvivalTreeState(chain.init(batch, **hyperparameters), greedy_siblings, sampled_siblings)

    def right(state: SurvivalTreeState, context: RoundContext) -> Array:
        """h [B, M], for sampling or greedy decoding."""
        sampled = context.warp.temperature[:, None] > 0
        return jnp.where(sampled, state.sampled_siblings, state.greedy_siblings)[:, :siblings]

    def decide(function: str, state: SurvivalTreeState, *arguments: Any) -> tuple[Array, SurvivalTreeState]:
        """A decision of `survival` with a gain that includes siblings."""
        rule = survival_with(partial(_gain, right(state, arguments[-1])), positions)
        answer, policy = getattr(rule, function)(state.policy, *arguments)
        return answer, state._replace(policy=policy)

    def update(state: SurvivalTreeState, draft: TreeDraft, result: TreeResult) -> SurvivalTreeState:
        return state._replace(policy=learn(state.policy, draft, result, draft.places, result.emitted))

    def beside(state: SurvivalTreeState, length: Array, free: Array, context: RoundContext) -> Array:
        """Numbers [B, P] int32 of the siblings that pay; none is worth more than those before it."""
        worth, policy = marginals(state.policy.chances, length, right(state, context)), state.policy
        (rank, sums), count = ranked(worth), jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, :]
        time = time_of(policy, length[:, None] + count) - time_of(policy, length[:, None])
        net = jnp.where(count <= free[:, None], sums - rate_of(policy)[:, None] * time, -jnp.inf)
        chosen = (rank < jnp.argmax(net, axis=1)[:, None, None]) & (worth > 0)
        return jnp.sum(chosen, axis=2, dtype=jnp.int32)

    return TreePolicy(
        init,
        partial(decide, "begin"),
        proceed=partial(decide, "proceed"),
        update=update,  # type: ignore[arg-type]
        threshold=lambda state: rate_of(state.policy),
        hyperparameters={**chain.hyperparameters, **defaults_of(init)},
        siblings=siblings,
        beside=beside,
    )


def _gain(right: Array, state: SurvivalState, drafted: Array, context: RoundContext) -> Array:
    """As `gain_by_row`, plus the gain of siblings with a further draft (not those of later ones) minus that without."""
    chances = remember(state.chances, drafted, expected(state, drafted)[:, 0])
    now, then = (marginals(chances, drafted + more, right) for more in (0, 1))
    more = _net_gain(state, then, drafted[:, None] + FURTHER) - _net_gain(state, now, drafted[:, None])
    return jnp.max(net_by_row(state, drafted, context) + more, axis=1)


def _net_gain(state: SurvivalState, worth: Array, drafts: Array) -> Array:
    """Expected tokens of siblings of value `worth` [B, P, M] with `drafts` [B, N] minus their verification cost."""
    count = jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, None, :]
    filled = drafts[:, :, None] + count
    time = time_of(state, filled.reshape(len(drafts), -1)).reshape(filled.shape) - time_of(state, drafts)[:, :, None]
    net = ranked(worth)[1][:, None, :] - rate_of(state)[:, None, None] * time
    return jnp.max(jnp.where(filled <= state.widest[:, None, None], net, 0.0), axis=2)


def marginals(chance: Array, length: Array, right: Array) -> Array:
    """Value in tokens of every sibling of the first `length` [B] drafts, [B, P, M]; non-increasing along M.

    `chance` [B, P]: a_d, conditional acceptance probability of each draft; `right` [B, M]: h of each sibling.
    """
    depth = jnp.arange(chance.shape[1], dtype=jnp.int32)[None, :]
    missed = jnp.where(depth < length[:, None], _of_earlier(chance) * (1.0 - chance), 0.0)
    accepted = right * _of_earlier(1.0 - right)
    index = jnp.arange(accepted.shape[1], dtype=jnp.int32)
    upto = (index[None, :] <= index[:, None])[None]
    falling = jnp.min(jnp.where(upto, accepted[:, None, :], jnp.inf), axis=2)
    return missed[:, :, None] * falling[:, None, :]


def ranked(worth: Array) -> tuple[Array, Array]:
    """Ranks [B, P, M] int32 by decreasing worth, then by index, and the worth [B, P+1] of the best 0, 1, 2 ... P."""
    flat = worth.reshape(worth.shape[0], -1)
    index = jnp.arange(flat.shape[1], dtype=jnp.int32)
    earlier = index[None, None, :] < index[None, :, None]
    mine, other = flat[:, :, None], flat[:, None, :]
    rank = jnp.sum((other > mine) | ((other == mine) & earlier), axis=2, dtype=jnp.int32)
    count = jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, :, None]
    return rank.reshape(worth.shape), jnp.sum(jnp.where(rank[:, None] < count, flat[:, None], 0.0), axis=2)


def _of_earlier(values: Array) -> Array:
    """Exclusive cumulative product along N of [B, N], as one operation: a cumprod is a dozen on a CPU."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    earlier = (index[None, :] < index[:, None])[None]
    return jnp.prod(jnp.where(earlier, values[:, None, :], 1.0), axis=2)
