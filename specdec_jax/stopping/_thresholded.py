"""Policies that stop when a score of the next distribution is below a threshold, which Algorithm 1 may adapt.

They share the threshold's controller, the option to keep the failing distribution's token, and the plotted value. Each
policy defines its score and further updates.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specdec_jax.stopping._algorithm_1 import algorithm_1
from specdec_jax.types import (
    Array,
    Distribution,
    Draft,
    Init,
    PolicyState,
    RoundContext,
    StoppingPolicy,
    Update,
    VerificationResult,
)
from specdec_jax.types.seams import no_update

Score = Callable[[Any, Distribution, Array], tuple[Array, Any]]
"""(state, distribution, drafted) -> (score [B] float32, state); below the threshold the next token is not drafted."""


def entropy_bound(entropy_factor: Array, entropy: Array) -> Array:
    """AdaEDL's bound of the acceptance rate, 1 - sqrt(entropy_factor * H) [B] float32 (arXiv 2410.18351, section 3)."""
    return 1.0 - jnp.sqrt(entropy_factor * entropy.astype(jnp.float32))


def in_unit(unit: str, threshold: Callable[[PolicyState], Array]) -> Callable[[PolicyState], Array]:
    """`threshold` with its unit for charts, which draw all but a "probability" on an axis of its own."""
    vars(threshold)["unit"] = unit
    return threshold


def thresholded(
    init: Init, score: Score, *, keep_checked_token: bool, adaptive: bool = True, learn: Update = no_update
) -> StoppingPolicy:
    """A policy that stops in `check` when `score` is below the threshold of the state's `control`.

    The state is a NamedTuple with the fields `control`, an Algorithm1State, and `failed` [B] bool, whether the last
    distribution's score was below the threshold.

    Args:
        keep_checked_token: draft the token of the failing distribution too and stop after it. Its pass was already run,
            and the decision still precedes the draw.
        adaptive: Algorithm 1 adapts the threshold; otherwise it is constant.
        learn: further updates of the state after a verification.
    """

    def check(state: Any, distribution: Distribution, drafted: Array, context: RoundContext) -> tuple[Array, Any]:
        scored, after = score(state, distribution, drafted)
        failed = scored < state.control.threshold
        wants = jnp.ones_like(context.alive) if keep_checked_token else ~failed
        return wants, after._replace(failed=failed)

    def update(state: Any, draft: Draft, result: VerificationResult) -> Any:
        learnt = learn(state, draft, result)
        return learnt._replace(control=algorithm_1(state.control, draft, result)) if adaptive else learnt

    shown = in_unit("probability", lambda state: state.control.threshold)
    policy = StoppingPolicy(init, check=check, update=update, threshold=shown)
    # the failing distribution's token stays, and is the last
    return policy.replace(proceed=lambda state, *_: (~state.failed, state)) if keep_checked_token else policy
