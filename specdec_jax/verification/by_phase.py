"""One verifier in routine text, another one where the target reasons: relaxed where little is at stake, else exact."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import hyperparameters_of, select_rows, with_hyperparameters
from specdec_jax.phase import ROUTINE, phase_of
from specdec_jax.types import Array, Distribution, Draft, RoundContext, Verifier, VerifierState
from specdec_jax.verification.lenience import lenience
from specdec_jax.verification.rejection import rejection


class ByPhaseState(NamedTuple):
    routine: VerifierState
    reasoning: VerifierState


def by_phase(routine: Verifier | None = None, reasoning: Verifier | None = None) -> Verifier:
    """`routine` (lenience unless given) verifies rounds of routine phases, `reasoning` (rejection) the others.

    A row's phase is that of its monitor when the round began, so a round is verified by one verifier from its first
    draft to its last token, and each round has that verifier's distribution. Lossless if both are: the phase is known
    before anything is drafted. A decoder needs a monitor that watches phases; `generation.build_pair` brings one.

    Hyperparameters (`init`): those of both; a hyperparameter that both have is routine_NAME and reasoning_NAME.

    Raises:
        ValueError: something other than a Verifier.
    """
    relaxed = lenience() if routine is None else routine
    exact = rejection() if reasoning is None else reasoning
    for name, part in (("routine", relaxed), ("reasoning", exact)):
        if not isinstance(part, Verifier):
            raise ValueError(f"by_phase needs a verifier for {name} phases, got {part!r}")
    relaxed_names, exact_names = _hyperparameter_names(relaxed, exact)

    @with_hyperparameters({**_defaults(relaxed, relaxed_names), **_defaults(exact, exact_names)})
    def init(batch: int, **hyperparameters: Any) -> ByPhaseState:
        unknown = hyperparameters.keys() - {*relaxed_names, *exact_names}
        if unknown:
            raise TypeError(f"by_phase has no hyperparameter {min(unknown)!r}")
        given = [
            {own: hyperparameters[name] for name, own in names.items() if name in hyperparameters}
            for names in (relaxed_names, exact_names)
        ]
        return ByPhaseState(relaxed.init(batch, **given[0]), exact.init(batch, **given[1]))

    def verify(
        state: ByPhaseState, draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, Callable[[Array], Array], ByPhaseState]:
        is_routine = phase_of(context) == ROUTINE
        lengths_a, next_a, state_a = relaxed.verify(state.routine, draft, distributions, context)
        lengths_b, next_b, state_b = exact.verify(state.reasoning, draft, distributions, context)

        def next_distribution(accepted: Array) -> Array:
            return jnp.where(is_routine[:, None], next_a(accepted), next_b(accepted))

        after = ByPhaseState(
            select_rows(is_routine, state_a, state.routine), select_rows(is_routine, state.reasoning, state_b)
        )
        return jnp.where(is_routine[:, None], lengths_a, lengths_b), next_distribution, after

    return Verifier(
        init,
        verify,
        lossless=relaxed.lossless and exact.lossless,
        needs_log_q=relaxed.needs_log_q or exact.needs_log_q,
        greedy_only=relaxed.greedy_only or exact.greedy_only,
        needs_phases=True,
    )


def _hyperparameter_names(relaxed: Verifier, exact: Verifier) -> tuple[dict[str, str], dict[str, str]]:
    """For each of the two the names its hyperparameters have outside, and their own."""
    of_relaxed, of_exact = hyperparameters_of(relaxed.init), hyperparameters_of(exact.init)
    both = of_relaxed.keys() & of_exact.keys()
    named = lambda prefix, names: {f"{prefix}_{own}" if own in both else own: own for own in names}  # noqa: E731
    return named("routine", of_relaxed), named("reasoning", of_exact)


def _defaults(verifier: Verifier, names: dict[str, str]) -> dict[str, Any]:
    known = hyperparameters_of(verifier.init)
    return {name: known[own] for name, own in names.items()}
