"""No drafter: every round is one target pass and one token. Plain decoding in the same program as all the rest."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specdec_jax.drafters._stateless import no_commit, no_state
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, Drafter, DraftInfo, PolicyState, RoundContext, StoppingPolicy


@strategy
def no_drafter() -> Drafter:
    """A drafter that never drafts; the baseline of every speed-up."""

    def propose(
        params: Any,
        state: tuple[()],
        tokens: Array,
        context: RoundContext,
        uniform: Callable[[Array], Array],
        policy: StoppingPolicy,
        policy_state: PolicyState,
        keep_log_q: bool,
    ) -> tuple[Draft, DraftInfo, tuple[()], PolicyState]:
        del params, tokens, uniform, policy, keep_log_q
        zeros = jnp.zeros_like(context.length)
        none = jnp.zeros((zeros.shape[0], 0), jnp.int32)
        empty = none.astype(jnp.float32)
        draft = Draft(tokens=none, log_q=None, one_hot=none.astype(bool), length=zeros)
        return draft, DraftInfo(zeros, zeros, empty, empty, zeros), state, policy_state

    return Drafter(no_state, propose, no_commit, max_draft_length=0)
