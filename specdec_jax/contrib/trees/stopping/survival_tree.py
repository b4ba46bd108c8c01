"""`survival` with siblings: fills the verification width with siblings, and uses a wider one where that pays.

The draft at depth d is the first rejected one with probability S_d (1 - a_d), and its i-th sibling is then accepted
with probability (1 - h_1) ... (1 - h_(i-1)) h_i, each a gain of one token. The best n siblings are verified, with the
n for which their value exceeds R (V(k + n) - V(k)) most. With `expanded` the drafter's next pass also reads the best
siblings, and their children compete with siblings: by the value of the sibling and the acceptance probability of a
token with unknown distribution. For the rest see stopping/survival.py (SpecDec++, arXiv 2405.19715), for measurements
docs/combs.md. Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.contrib.trees.layout import places
from specdec_jax.contrib.trees.seams import Extras, TreeDraft, TreePolicy, TreeResult
from specdec_jax.contrib.trees.stopping._siblings import marginals, ranks, sums, worths_of_children
from specdec_jax.ranges import Between
from specdec_jax.stopping._survival_gain import Ahead, best_within, further, net_by_row
from specdec_jax.stopping._survival_state import (
    LEVELS,
    SurvivalState,
    learn_chances,
    learn_moves,
    learn_rate,
    rate_of,
    time_of,
)
from specdec_jax.stopping.survival import survival, survival_with
from specdec_jax.strategy import defaults_of, strategy
from specdec_jax.types import Array, Distribution, RoundContext, StoppingPolicy

# h of the second, third and fourth candidate, for smollm2 and smollm2-drafter-reading (docs/combs.md).
GREEDY_SIBLINGS, SAMPLED_SIBLINGS = (0.28, 0.2, 0.17), (0.23, 0.13, 0.1)
Shares = Annotated[Any, Between(0, 1, entries=len(GREEDY_SIBLINGS))]


class SurvivalTreeState(NamedTuple):
    policy: SurvivalState
    greedy_siblings: Array  # [B, M] float32, h
    sampled_siblings: Array  # [B, M]


@strategy
def survival_tree(
    positions: Annotated[int, Between(1)] = 32,
    siblings: Annotated[int, Between(1, len(GREEDY_SIBLINGS))] = 3,
    expanded: Annotated[int, Between(0)] = 0,
) -> TreePolicy:
    """Draft while it pays, and verify the siblings that pay.

    Args:
        positions: maximum tokens of a pass (P): drafts, siblings and children.
        siblings: maximum verified siblings of a draft (M), 1 to 3.
        expanded: number of siblings that a drafter pass expands (W); 0: no children.

    Hyperparameters (`init`): those of `survival`, greedy_siblings and sampled_siblings (h of the second, third and
    fourth candidate).
    """

    def right(state: SurvivalTreeState, context: RoundContext) -> Array:
        """h [B, M], for sampling or greedy decoding."""
        is_sampled = (context.warp.temperature > 0)[:, None]
        return jnp.where(is_sampled, state.sampled_siblings, state.greedy_siblings)[:, :siblings]

    def rule(state: SurvivalTreeState, context: RoundContext) -> StoppingPolicy:
        """The policy for chains with a gain that includes siblings."""
        return survival_with(partial(_gain, right(state, context)), positions)

    chain = survival(positions)

    def init(
        batch: int,
        greedy_siblings: Shares = GREEDY_SIBLINGS,
        sampled_siblings: Shares = SAMPLED_SIBLINGS,
        **hyperparameters: Any,
    ) -> SurvivalTreeState:
        return SurvivalTreeState(chain.init(batch, **hyperparameters), greedy_siblings, sampled_siblings)

    def begin(state: SurvivalTreeState, context: RoundContext) -> tuple[Array, SurvivalTreeState]:
        answer, policy = rule(state, context).begin(state.policy, context)
        return answer, state._replace(policy=policy)

    def check(
        state: SurvivalTreeState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalTreeState]:
        answer, policy = rule(state, context).check(state.policy, distribution, drafted, context)
        return answer, state._replace(policy=policy)

    def proceed(
        state: SurvivalTreeState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalTreeState]:
        answer, policy = rule(state, context).proceed(state.policy, distribution, token, drafted, context)
        return answer, state._replace(policy=policy)

    def update(state: SurvivalTreeState, draft: TreeDraft, result: TreeResult) -> SurvivalTreeState:
        policy = learn_moves(learn_chances(state.policy, draft, result, positions), result)  # type: ignore[arg-type]
        return state._replace(policy=learn_rate(policy, places(draft), result.emitted))

    def beside(
        state: SurvivalTreeState, length: Array, free: Array, context: RoundContext, parent: Array | None
    ) -> Extras:
        return _wanted(state.policy, length, free, context, right(state, context), parent)

    def expand(state: SurvivalTreeState, drafted: Array, context: RoundContext) -> Array:
        return marginals(state.policy.predicted, drafted, right(state, context))

    return TreePolicy(
        init,
        begin,
        check,
        proceed,
        update,  # type: ignore[arg-type]
        lambda state: rate_of(state.policy),
        hyperparameters={**chain.hyperparameters, **defaults_of(init)},
        siblings=siblings,
        beside=beside,
        expanded=expanded,
        expand=expand if expanded else None,
    )


def _gain(right: Array, state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """As `gain_by_row`, plus the gain of siblings with further drafts minus that without.

    Siblings of the next draft are included, by its acceptance probability; those of later ones are neglected.
    """
    drafted, net = ahead.drafted, net_by_row(state, ahead, context)
    next_one = jnp.arange(state.predicted.shape[1], dtype=jnp.int32)[None, :] == drafted[:, None]
    chance = jnp.where(next_one, ahead.tokens[:, :1], state.predicted)
    now, then = (marginals(chance, drafted + more, right) for more in (0, 1))
    drafts = drafted[:, None] + further(ahead)
    net = net + (_net_gain(state, then, drafts) - _net_gain(state, now, drafted[:, None]))
    return best_within(net, ahead, context)


def _net_gain(state: SurvivalState, worth: Array, drafts: Array) -> Array:
    """Expected tokens of siblings of value `worth` [B, P, M] with `drafts` [B, N] minus their verification cost."""
    count = jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, None, :]
    filled = drafts[:, :, None] + count
    flat = filled.reshape(filled.shape[0], -1)
    time = time_of(state, flat).reshape(filled.shape) - time_of(state, drafts)[:, :, None]
    net = sums(worth, ranks(worth), worth.shape[1])[:, None, :] - rate_of(state)[:, None, None] * time
    return jnp.max(jnp.where(filled <= state.settings.widest[:, None, None], net, 0.0), axis=2)


def _wanted(
    state: SurvivalState, length: Array, free: Array, context: RoundContext, right: Array, parent: Array | None
) -> Extras:
    """Numbers of siblings of each draft, [B, P] int32, and of children, that pay.

    A child is never worth more than its sibling, nor a sibling more than earlier ones, so the best ones form a tree.
    """
    worth, siblings_each = marginals(state.predicted, length, right), right.shape[1]
    flat = worth.reshape(worth.shape[0], -1)
    if parent is not None:
        first = state.forecast[:, LEVELS, 0]  # a child follows a rejected draft, like a round's first token
        children = worths_of_children(worth, parent, first, right)
        flat = jnp.concatenate([flat, children.reshape(worth.shape[0], -1)], axis=1)
    rank, spaces, siblings = ranks(flat), state.predicted.shape[1], worth[0].size
    count = jnp.arange(spaces + 1, dtype=jnp.int32)[None, :]
    time = time_of(state, length[:, None] + count) - time_of(state, length[:, None])
    net = jnp.where(count <= free[:, None], sums(flat, rank, spaces) - rate_of(state)[:, None] * time, -jnp.inf)
    chosen = (rank < jnp.argmax(net, axis=1)[:, None]) & (flat > 0)
    counts = jnp.sum(chosen[:, :siblings].reshape(worth.shape), axis=2, dtype=jnp.int32)
    if parent is None:
        return Extras(counts)
    return Extras(counts, jnp.sum(chosen[:, siblings:].reshape(*parent.shape, siblings_each), axis=2, dtype=jnp.int32))
