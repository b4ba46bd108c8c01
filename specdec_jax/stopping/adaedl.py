"""AdaEDL: stop when the drafter's entropy says the next token would likely be rejected (arXiv 2410.18351).

The bound (section 3, appendix B): acceptance is one minus the total variation of drafter and target; Pinsker and the
stable-entropy hypothesis give about `1 - sqrt(entropy_factor * H)`. Drafting stops when that falls under lambda, and
lambda follows the acceptance seen (Algorithm 1). What the paper leaves open is decided here and can be set:

- entropy in nats, of the law as sampled (after warping), or raw; at temperature 0 the raw one;
- the running acceptance starts at the target acceptance, lambda at 0.7 (the paper sweeps 0.3 to 0.9);
- a round without drafts (0/0) leaves both unchanged: read as acceptance 0 it would drive lambda past 1, after which
  nothing is ever drafted. Lambda is clamped to [0, 0.99] for the same reason.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.numbers import per_row
from specdec_jax.stopping._defaults import always_begin, always_proceed
from specdec_jax.types import Array, Draft, Law, RoundContext, StoppingPolicy, Verdict

HIGHEST_THRESHOLD = 0.99


class AdaEDLState(NamedTuple):
    threshold: Array  # [B] float32, lambda
    acceptance: Array  # [B] float32, the running acceptance rate
    failed: Array  # [B] bool, the last check failed (read by keep_checked_token)
    entropy_factor: Array  # [B] float32, the paper's gamma
    target_acceptance: Array  # [B] float32, alpha
    acceptance_decay: Array  # [B] float32, beta1
    threshold_decay: Array  # [B] float32, beta2
    step: Array  # [B] float32, epsilon


def adaedl(keep_checked_token: bool = False, raw_entropy: bool = False) -> StoppingPolicy:
    """AdaEDL as published, or with the law that fails the check still giving its token.

    Args:
        keep_checked_token: draw the token of the failing law too and stop after it. Its pass is already paid, and the
            decision still precedes the draw, so this is as lossless as the published rule. Ours, not the paper's.
        raw_entropy: read the entropy at temperature 1 without truncation instead of the law's as sampled.

    Numbers of `init`, with the paper's values (section 4.4): entropy_factor 0.2 (> 0), threshold 0.7 (lambda, in
    [0, 0.99]), target_acceptance 0.9 (alpha), acceptance_decay 0.5 (beta1), threshold_decay 0.9 (beta2), step 0.01
    (epsilon), initial_acceptance (alpha unless given).
    """

    def init(
        batch: int,
        entropy_factor: Any = 0.2,
        threshold: Any = 0.7,
        target_acceptance: Any = 0.9,
        acceptance_decay: Any = 0.5,
        threshold_decay: Any = 0.9,
        step: Any = 0.01,
        initial_acceptance: Any = None,
    ) -> AdaEDLState:
        target = per_row(batch, target_acceptance, "target_acceptance", low=0.0, high=1.0)
        start = target if initial_acceptance is None else initial_acceptance
        return AdaEDLState(
            threshold=per_row(batch, threshold, "threshold", low=0.0, high=HIGHEST_THRESHOLD),
            acceptance=per_row(batch, start, "initial_acceptance", low=0.0, high=1.0),
            failed=per_row(batch, False, "failed", dtype=bool),
            entropy_factor=per_row(batch, entropy_factor, "entropy_factor", low=0.0, open_low=True),
            target_acceptance=target,
            acceptance_decay=per_row(batch, acceptance_decay, "acceptance_decay", low=0.0, high=1.0),
            threshold_decay=per_row(batch, threshold_decay, "threshold_decay", low=0.0, high=1.0),
            step=per_row(batch, step, "step", low=0.0, high=1.0),
        )

    def check(state: AdaEDLState, law: Law, drafted: Array, context: RoundContext) -> tuple[Array, AdaEDLState]:
        del drafted
        entropy = law.raw_entropy if raw_entropy else law.entropy
        bound = 1.0 - jnp.sqrt(state.entropy_factor * entropy.astype(jnp.float32))
        failed = bound < state.threshold
        draw = jnp.ones_like(context.alive) if keep_checked_token else ~failed
        return draw, state._replace(failed=failed)

    def stop_after_failure(
        state: AdaEDLState, law: Law, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, AdaEDLState]:
        del law, token, drafted, context
        return ~state.failed, state

    proceed = stop_after_failure if keep_checked_token else always_proceed
    return StoppingPolicy(init, always_begin, check, proceed, update_threshold, lambda state: state.threshold)


def update_threshold(state: AdaEDLState, draft: Draft, verdict: Verdict) -> AdaEDLState:
    """Algorithm 1, in its order. A draft cut short by the token budget is not 'all accepted at full length'."""
    accepted = verdict.length - 1
    full_length = draft.tokens.shape[1]
    rate = accepted.astype(jnp.float32) / jnp.maximum(draft.length, 1).astype(jnp.float32)
    acceptance = state.acceptance_decay * state.acceptance + (1.0 - state.acceptance_decay) * rate
    lower = jnp.where(accepted != full_length, state.threshold - state.step, state.threshold)
    proposal = jnp.where(acceptance < state.target_acceptance, state.threshold + state.step, lower)
    threshold = state.threshold_decay * state.threshold + (1.0 - state.threshold_decay) * proposal
    drafted = draft.length > 0
    return state._replace(
        acceptance=jnp.where(drafted, acceptance, state.acceptance),
        threshold=jnp.where(drafted, jnp.clip(threshold, 0.0, HIGHEST_THRESHOLD), state.threshold),
    )
