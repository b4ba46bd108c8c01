"""Rules that stop where a score of the next distribution falls under a threshold that Algorithm 1 may move.

What they share: the controller of the threshold, the token of the failing distribution kept or not, and what a plot
shows. A rule brings its score, and what it learns beside the threshold.
"""

from typing import Any, Protocol

import jax.numpy as jnp

from specdec_jax.stopping._algorithm_1 import Algorithm1State, algorithm_1
from specdec_jax.stopping._defaults import proceed_unless_failed
from specdec_jax.types import Array, Distribution, Draft, Init, RoundContext, StoppingPolicy, Update, VerificationResult
from specdec_jax.types.defaults import no_update


class ThresholdedState(Protocol):
    """What these rules' states have in common; they are NamedTuples with these fields among others."""

    @property
    def control(self) -> Algorithm1State:
        """The threshold and what moves it."""
        ...

    @property
    def failed(self) -> Array:
        """[B] bool, the last distribution's score was under the threshold."""
        ...

    def _replace(self, **fields: Any) -> Any: ...


class Score(Protocol):
    """Gives (score [B] float32, state); the next token is drafted unless its score is under the threshold."""

    def __call__(self, state: Any, distribution: Distribution, drafted: Array, /) -> tuple[Array, Any]: ...


def thresholded(
    init: Init, score: Score, *, keep_checked_token: bool, adaptive: bool = True, learn: Update = no_update
) -> StoppingPolicy:
    """The policy that stops in `check` where `score` is under the threshold of the state's `control`.

    Args:
        keep_checked_token: draw the token of the failing distribution too and stop after it. Its pass is paid already,
            and the decision still precedes the draw.
        adaptive: Algorithm 1 moves the threshold; otherwise it stays.
        learn: what else the verification teaches.
    """

    def check(
        state: ThresholdedState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, Any]:
        scored, after = score(state, distribution, drafted)
        failed = scored < state.control.threshold
        draw = jnp.ones_like(context.alive) if keep_checked_token else ~failed
        return draw, after._replace(failed=failed)

    def update(state: Any, draft: Draft, result: VerificationResult) -> Any:
        learnt = learn(state, draft, result)
        return learnt._replace(control=algorithm_1(state.control, draft, result)) if adaptive else learnt

    policy = StoppingPolicy(init, check=check, update=update, threshold=lambda state: state.control.threshold)
    return policy.replace(proceed=proceed_unless_failed) if keep_checked_token else policy
