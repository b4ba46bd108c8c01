"""DSpark's schedule: draft and verify as many tokens as maximise the round's expected tokens per time.

DSpark (arXiv 2607.05147, algorithm 1) drafts a block in one pass, estimates the acceptance probability c_i of each
draft by a trained confidence head, and verifies the k drafts that maximise tau(k) / T(k), where tau(k) = 1 + S_1 + ...
+ S_k, S_i = c_1 ... c_i, and T(k) is a measured time. T is a step function, so all k are compared.

Differences: a drafter model computes c_i one by one, each for `drafter_cost`, which T includes; confidences that are
not known yet are assumed to equal the last one. c is the drafter's largest probability to the power `exponent` instead
of a head's output. The schedule is that of one row, not of all requests. The first pass of a round is always made, as a
block is always drafted. `survival` differs in three ways: its price of time is the row's long-run rate instead of the
round's own, its probabilities are calibrated online, and its forecast is half the row's mean.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Between, NotNegative, Positive
from specdec_jax.stopping._readings import opening_cost, relative_drafter_cost
from specdec_jax.stopping.survival import verification_per_row
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, RoundContext, StoppingPolicy

HORIZON = 8  # maximum number of further drafts in one comparison
POSITIONS = 32  # longest draft with a verification time of its own


class DSparkState(NamedTuple):
    survival: Array  # [B] float32, S of this round's draft
    confidence: Array  # [B] float32, of the last distribution
    tokens: Array  # [B] float32, tau of this round
    time: Array  # [B] float32, of this round's drafter passes, in target passes
    drafter_cost: Array  # [B] float32, a drafter pass, in target passes
    verification: Array  # [B, P+1] float32, T of 0 ... P drafts
    exponent: Array  # [B] float32


@strategy
def dspark() -> StoppingPolicy:
    """Draft while a longer draft has a higher ratio of expected tokens to time.

    Hyperparameters (`init`): drafter_cost 0.1 (target passes, >= 0), verification_times (time of the pass that verifies
    0, 1, 2 ... drafts, in target passes, the last one for longer drafts; 1 + 0.02 k unless given), exponent 1 (of the
    confidence, > 0).
    """

    def init(
        batch: int,
        drafter_cost: NotNegative = 0.1,
        verification_times: Annotated[Any, Between(1e-3, entries=0)] = None,
        exponent: Positive = 1.0,
    ) -> DSparkState:
        certain = full(batch, 1.0)
        return DSparkState(
            survival=certain,
            confidence=certain,
            tokens=certain,
            time=full(batch, 0.0),
            drafter_cost=drafter_cost,
            verification=verification_per_row(batch, verification_times, POSITIONS),
            exponent=exponent,
        )

    def begin(state: DSparkState, context: RoundContext) -> tuple[Array, DSparkState]:
        certain = jnp.ones_like(state.survival)
        return context.budget > 0, state._replace(survival=certain, tokens=certain, time=jnp.zeros_like(certain))

    def check(
        state: DSparkState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, DSparkState]:
        confidence = distribution.max_prob.astype(jnp.float32) ** state.exponent
        opening = jnp.where(drafted == 0, opening_cost(context), 0.0)
        time = state.time + state.drafter_cost * (relative_drafter_cost(context) + opening)
        state = state._replace(confidence=confidence, time=time)
        return _pays(state, drafted, context, paid=1), state

    def proceed(
        state: DSparkState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, DSparkState]:
        survival = state.survival * state.confidence
        state = state._replace(survival=survival, tokens=state.tokens + survival)
        return _pays(state, drafted, context, paid=0), state

    return StoppingPolicy(init, begin, check, proceed, threshold=lambda state: state.tokens)


def _pays(state: DSparkState, drafted: Array, context: RoundContext, paid: int) -> Array:
    """[B] bool: some number of further drafts raises the ratio, if the passes of the first `paid` have been made."""
    further = jnp.arange(HORIZON + 1, dtype=jnp.int32)[None, :]
    powers = jnp.where(further > 0, state.confidence[:, None] ** further.astype(jnp.float32), 0.0)
    tokens = state.tokens[:, None] + state.survival[:, None] * jnp.cumsum(powers, axis=1)
    passes = jnp.maximum(further - paid, 0).astype(jnp.float32)
    drafts = drafted[:, None] + further
    slot = jnp.clip(drafts, 0, state.verification.shape[1] - 1)
    cost = (state.drafter_cost * relative_drafter_cost(context))[:, None]
    time = state.time[:, None] + passes * cost + jnp.take_along_axis(state.verification, slot, axis=1)
    ratio = jnp.where(drafts <= context.budget[:, None], tokens / time, 0.0)
    return jnp.max(ratio[:, 1:], axis=1) > ratio[:, 0]
