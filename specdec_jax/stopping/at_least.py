"""A minimum draft length for any policy."""

from typing import Annotated

from specdec_jax.ranges import Between
from specdec_jax.stopping.static import static
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, PolicyState, RoundContext, StoppingPolicy


@strategy
def at_least(minimum: Annotated[int, Between(0)] = 1, policy: StoppingPolicy = static()) -> StoppingPolicy:
    """`policy`, which may stop only after `minimum` tokens are drafted.

    Hyperparameters (`init`): those of `policy`.
    """

    def begin(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
        go_on, state = policy.begin(state, context)
        return go_on | (minimum > 0), state

    def check(
        state: PolicyState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, PolicyState]:
        draw, state = policy.check(state, distribution, drafted, context)
        return draw | (drafted < minimum), state

    def proceed(
        state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, PolicyState]:
        go_on, state = policy.proceed(state, distribution, token, drafted, context)
        return go_on | (drafted < minimum), state

    return policy.replace(begin=begin, check=check, proceed=proceed)
