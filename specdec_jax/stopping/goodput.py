"""The draft length with the largest goodput: SmartSpec / TurboSpec (arXiv 2406.14066, section 4).

With an acceptance rate a for every position, k drafts give `E(k) = 1 + a + ... + a^k` tokens in the time
`T(k) = 1 + drafter_cost * k + verification_cost * k` (in target passes of one token), and the round drafts the k with
the largest E(k) / T(k). Differences and choices: the paper fits its batch time to measurements of a server, here it
consists of the two costs, measured by `experiments.step_cost`; a is estimated from decayed counts of accepted and
evaluated positions (positions after a rejected one are not evaluated) with a prior that does not decay,
`prior_acceptance` with the weight of `prior_weight` positions. The counts decay in every round, also without drafts:
with `least` 0 a drafter that was switched off is eventually tried again.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Between, NotNegative, Positive, Share
from specdec_jax.stopping._readings import opening_cost, relative_drafter_cost
from specdec_jax.stopping.static import proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, RoundContext, StoppingPolicy, VerificationResult


class GoodputState(NamedTuple):
    draft_length: Array  # [B] int32, this round's
    accepted: Array  # [B] float32, decayed count
    evaluated: Array  # [B] float32, decayed count
    least: Array  # [B] int32
    drafter_cost: Array  # [B] float32, a drafter pass, in target passes
    verification_cost: Array  # [B] float32, verifying one more token, in target passes
    prior_acceptance: Array  # [B] float32
    prior_weight: Array  # [B] float32, positions
    decay: Array  # [B] float32


@strategy
def goodput(most: Annotated[int, Between(1)] = 16) -> StoppingPolicy:
    """The draft length with the most expected tokens per time at the observed acceptance rate.

    Args:
        most: maximum draft length considered. A smaller `max_draft_length` or token budget cuts the draft; the result
            is still the best allowed length, because E(k) / T(k) has a single peak.

    Hyperparameters (`init`): drafter_cost 0.1, verification_cost 0.02 (both >= 0), least 1 (shortest draft, 0 to
    `most`), prior_acceptance 0.7 (0 to 1), prior_weight 4 (positions, > 0), decay 0.95 (0 to 1).
    """

    def init(
        batch: int,
        drafter_cost: NotNegative = 0.1,
        verification_cost: NotNegative = 0.02,
        least: Annotated[Any, Between(0, most, whole=True)] = 1,
        prior_acceptance: Share = 0.7,
        prior_weight: Positive = 4.0,
        decay: Share = 0.95,
    ) -> GoodputState:
        return GoodputState(
            draft_length=least,
            accepted=full(batch, 0.0),
            evaluated=full(batch, 0.0),
            least=least,
            drafter_cost=drafter_cost,
            verification_cost=verification_cost,
            prior_acceptance=prior_acceptance,
            prior_weight=prior_weight,
            decay=decay,
        )

    def begin(state: GoodputState, context: RoundContext) -> tuple[Array, GoodputState]:
        opening = state.drafter_cost * opening_cost(context)  # of the first pass, in addition
        passes, k = relative_drafter_cost(context), jnp.arange(most + 1, dtype=jnp.float32)[None, :]
        accepted = state.prior_acceptance * state.prior_weight + state.accepted
        acceptance = accepted / (state.prior_weight + state.evaluated)  # of a position, estimated
        # Sum of powers, because (1 - a^(k+1)) / (1 - a) is 0/0 at a = 1.
        tokens = jnp.cumsum(acceptance[:, None] ** k, axis=1)
        cost = (state.drafter_cost * passes + state.verification_cost)[:, None]
        time = 1.0 + cost * k + jnp.where(k > 0, opening[:, None], 0.0)
        value = jnp.where(k >= state.least.astype(jnp.float32)[:, None], tokens / time, -jnp.inf)
        state = state._replace(draft_length=jnp.argmax(value, axis=1).astype(jnp.int32))  # the first of equal ones
        return state.draft_length > 0, state

    def update(state: GoodputState, draft: Draft, result: VerificationResult) -> GoodputState:
        evaluated = jnp.minimum(result.length, draft.length).astype(jnp.float32)
        accepted = (result.length - 1).astype(jnp.float32)
        return state._replace(
            accepted=state.decay * state.accepted + accepted, evaluated=state.decay * state.evaluated + evaluated
        )

    return StoppingPolicy(init, begin, proceed=proceed_to_length, update=update, threshold=show_length)
