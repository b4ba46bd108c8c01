"""AdaEDL's Algorithm 1 (arXiv 2410.18351, section 3): a threshold adapted to the observed acceptance rate.

It can control any rule that stops below a threshold; the paper also uses it for its max-confidence baseline. Choices
that the paper leaves open: the running acceptance rate starts at the target acceptance rate; a round without drafts
(0/0) leaves both unchanged, because counted as acceptance 0 it would raise the threshold above 1, after which nothing
is ever drafted; and the threshold is clamped to [0, 0.99] for the same reason.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.ranges import Between, Share
from specdec_jax.types import Array, Draft, VerificationResult

HIGHEST_THRESHOLD = 0.99
Threshold = Annotated[Any, Between(0, HIGHEST_THRESHOLD)]


class Algorithm1State(NamedTuple):
    threshold: Array  # [B] float32, lambda
    acceptance: Array  # [B] float32, the running acceptance rate
    target_acceptance: Array  # [B] float32, alpha
    acceptance_decay: Array  # [B] float32, beta1
    threshold_decay: Array  # [B] float32, beta2
    step: Array  # [B] float32, epsilon


def begin_algorithm_1(
    batch: int,
    threshold: Threshold = 0.7,
    target_acceptance: Share = 0.9,
    acceptance_decay: Share = 0.5,
    threshold_decay: Share = 0.9,
    step: Share = 0.01,
    initial_acceptance: Share = None,
) -> Algorithm1State:
    """The state before the first round, for the `init` of a rule. `initial_acceptance` None: the target acceptance."""
    start = target_acceptance if initial_acceptance is None else initial_acceptance
    return Algorithm1State(threshold, start, target_acceptance, acceptance_decay, threshold_decay, step)


def algorithm_1(
    state: Algorithm1State, draft: Draft, result: VerificationResult, *, falls_if_rejected: bool = True
) -> Algorithm1State:
    """One update, in the paper's order. A draft cut by the token budget does not count as accepted at full length.

    Without `falls_if_rejected` the threshold falls unless the draft had full length, whether it was accepted or not.
    """
    full_length, accepted = draft.tokens.shape[1], result.length - 1
    reached = accepted if falls_if_rejected else draft.length
    rate = accepted.astype(jnp.float32) / jnp.maximum(draft.length, 1).astype(jnp.float32)
    acceptance = state.acceptance_decay * state.acceptance + (1.0 - state.acceptance_decay) * rate
    lower = jnp.where(reached != full_length, state.threshold - state.step, state.threshold)
    proposal = jnp.where(acceptance < state.target_acceptance, state.threshold + state.step, lower)
    threshold = state.threshold_decay * state.threshold + (1.0 - state.threshold_decay) * proposal
    drafted = draft.length > 0
    return state._replace(
        acceptance=jnp.where(drafted, acceptance, state.acceptance),
        threshold=jnp.where(drafted, jnp.clip(threshold, 0.0, HIGHEST_THRESHOLD), state.threshold),
    )
