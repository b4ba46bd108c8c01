"""Draft length by phase: longer drafts in routine text, shorter ones where the target is uncertain.

Entropy-aware systems adapt the draft length to the phase of the text (`monitors/phases.py`): where the target's running
entropy is low, drafts are mostly accepted and long ones pay; where it is above the calibrated threshold, they are often
rejected and short ones waste less. Without another policy this is a fixed length per phase; around one it is a maximum
per phase, and the policy may stop sooner.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.phase import ROUTINE, phase_of
from specdec_jax.ranges import Count
from specdec_jax.stopping._wrapped import wrapped
from specdec_jax.stopping.static import show_length, static
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, PolicyState, RoundContext, StoppingPolicy


class PhaseLengthState(NamedTuple):
    policy: PolicyState  # state of the wrapped policy
    routine_length: Array  # [B] int32
    reasoning_length: Array  # [B] int32
    draft_length: Array  # [B] int32, of this round's phase


@strategy
def phase_length(policy: StoppingPolicy | None = None) -> StoppingPolicy:
    """At most `routine_length` or `reasoning_length` drafts per round, by its phase; `policy` may stop sooner.

    The decoder needs a monitor of phases. With length 0 a phase uses plain decoding.

    Hyperparameters (`init`): those of `policy`, routine_length 5, reasoning_length 2 (tokens, 0 or more).

    Raises:
        ValueError: `policy` already has a hyperparameter with one of these names.
    """
    # Without a policy, one that never stops: only the lengths per phase apply.
    inner = static(draft_length=np.iinfo(np.int32).max).replace(hyperparameters={}) if policy is None else policy

    def init(
        batch: int, routine_length: Count = 5, reasoning_length: Count = 2, **hyperparameters: Any
    ) -> PhaseLengthState:
        policy = inner.init(batch, **hyperparameters)
        return PhaseLengthState(policy, routine_length, reasoning_length, routine_length)

    def ask(name: str, state: PhaseLengthState, *arguments: Any) -> tuple[Array, PhaseLengthState]:
        """The policy's answer for a budget of at most the phase's length, so that it does not plan beyond it."""
        *seen, context = arguments
        capped = context._replace(budget=jnp.minimum(context.budget, state.draft_length))
        answer, after = getattr(inner, name)(state.policy, *seen, capped)
        return answer, state._replace(policy=after)

    def begin(state: PhaseLengthState, context: RoundContext) -> tuple[Array, PhaseLengthState]:
        length = jnp.where(phase_of(context) == ROUTINE, state.routine_length, state.reasoning_length)
        answer, state = ask("begin", state._replace(draft_length=length), context)
        return answer & (length > 0), state

    def proceed(
        state: PhaseLengthState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, PhaseLengthState]:
        answer, state = ask("proceed", state, distribution, token, drafted, context)
        return answer & (drafted < state.draft_length), state

    shown = {"threshold": show_length} if policy is None else {}
    functions = {"init": init, "begin": begin, "check": partial(ask, "check"), "proceed": proceed, **shown}
    return wrapped(inner, **functions, reads=inner.reads | {"phases"})
