"""Less frequent updates for any policy: it is updated after every n-th round only.

AdaEDL's Algorithm 1 (arXiv 2410.18351) adapts lambda after every round; implementations that read the acceptance back
from a device do so less often. This policy measures what that costs. The policy's `update` gets the result of every
n-th round that drafted, and not those of the n - 1 rounds before it; rounds without drafts are not counted. All other
functions are the policy's.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import full, select_rows
from specdec_jax.ranges import Length
from specdec_jax.stopping._wrapped import wrapped
from specdec_jax.stopping.adaedl import adaedl
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, PolicyState, StoppingPolicy, VerificationResult


class UpdateEveryState(NamedTuple):
    policy: PolicyState
    rounds: Array  # [B] int32
    since: Array  # [B] int32, rounds that drafted since the last update


@strategy
def update_every(policy: StoppingPolicy = adaedl()) -> StoppingPolicy:
    """`policy`, updated after every n-th round that drafted, with that round's result.

    Hyperparameters (`init`): the policy's, and rounds 4 (n, 1 or more; with 1 a policy that ignores rounds without
    drafts is unchanged).

    Raises:
        ValueError: `policy` already has a hyperparameter named rounds.
    """

    def init(batch: int, rounds: Length = 4, **hyperparameters: Any) -> UpdateEveryState:
        return UpdateEveryState(
            policy=policy.init(batch, **hyperparameters), rounds=rounds, since=full(batch, 0, dtype=jnp.int32)
        )

    def update(state: UpdateEveryState, draft: Draft, result: VerificationResult) -> UpdateEveryState:
        since = state.since + (draft.length > 0).astype(jnp.int32)
        due = since >= state.rounds
        learnt = select_rows(due, policy.update(state.policy, draft, result), state.policy)
        return state._replace(policy=learnt, since=jnp.where(due, 0, since))

    return wrapped(policy, init=init, update=update)
