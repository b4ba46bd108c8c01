"""A verifier per phase of the text: by default a lossy one in routine phases and an exact one in reasoning phases."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.decoding.phase import ROUTINE, phase_of
from specdec_jax.hyperparameters import select_rows
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier, VerifierState
from specdec_jax.verification.lenience import lenience
from specdec_jax.verification.rejection import rejection


class ByPhaseState(NamedTuple):
    routine: VerifierState
    reasoning: VerifierState


@strategy
def by_phase(routine: Verifier = lenience(), reasoning: Verifier = rejection()) -> Verifier:
    """`routine` verifies rounds in routine phases, `reasoning` the others.

    A row's phase is that of its monitor when the round began, so each round is verified by a single verifier and has
    its output distribution. Lossless if both are, because the phase is known before anything is drafted. The decoder
    needs a monitor of phases; `generation.build_pair` adds one.

    Hyperparameters (`init`): those of both; a name that both have becomes routine_NAME and reasoning_NAME.

    Raises:
        ValueError: an argument that is not a Verifier, or that verifies drafts other than chains.
    """
    parts = {"routine": routine, "reasoning": reasoning}
    for name, part in parts.items():
        if not isinstance(part, Verifier):
            raise ValueError(f"by_phase needs a verifier for {name} phases, got {part!r}")
        if part.tree_hooks is not None:
            raise ValueError(f"by_phase takes no {part.name}, which decides about trees itself: use block")
    both = routine.hyperparameters.keys() & reasoning.hyperparameters.keys()
    inner = {  # by the outer name of a hyperparameter: its verifier, and its name there
        f"{name}_{key}" if key in both else key: (name, key)
        for name, part in parts.items()
        for key in part.hyperparameters
    }

    def init(batch: int, **hyperparameters: Any) -> ByPhaseState:
        values: dict[str, dict[str, Any]] = {name: {} for name in parts}
        for outer, value in hyperparameters.items():
            name, key = inner[outer]
            values[name][key] = value
        return ByPhaseState(*(part.init(batch, **values[name]) for name, part in parts.items()))

    def verify(
        state: ByPhaseState, draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, ByPhaseState]:
        is_routine = phase_of(context) == ROUTINE
        lengths_a, next_a, state_a = routine.verify(state.routine, draft, distributions, context)
        lengths_b, next_b, state_b = reasoning.verify(state.reasoning, draft, distributions, context)

        def next_distribution(accepted: Array) -> Array:
            return jnp.where(is_routine[:, None], next_a(accepted), next_b(accepted))

        after = ByPhaseState(
            select_rows(is_routine, state_a, state.routine), select_rows(is_routine, state.reasoning, state_b)
        )
        return jnp.where(is_routine[:, None], lengths_a, lengths_b), next_distribution, after

    return Verifier(
        init,
        verify,
        lossless=routine.lossless and reasoning.lossless,
        needs_log_q=routine.needs_log_q or reasoning.needs_log_q,
        greedy_only=routine.greedy_only or reasoning.greedy_only,
        needs_phases=True,
        hyperparameters={outer: parts[name].hyperparameters[key] for outer, (name, key) in inner.items()},
    )
