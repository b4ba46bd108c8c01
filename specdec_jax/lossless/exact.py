"""The exact distribution of the first emitted tokens, on toy models, against the target's.

`prove_exactly` sums over all drafts, numbers of accepted tokens and next tokens, round by round with the states of
policy and verifier, in float64. It calls the policy and the verifier as the decoder does, so it also applies to a
user's file; only the draft loop (decoding/draft_loop.py) is reimplemented in enumeration.py. The sum over all rounds
gives the output distribution itself, which limits it to short drafts. For long ones see long_drafts.py.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.decoding import no_monitor
from specdec_jax.lossless.counterexample import Counterexample, first_wrong
from specdec_jax.lossless.coverage import Tally
from specdec_jax.lossless.enumeration import enumerate_distribution, first_nodes, setting_of, target_joint
from specdec_jax.lossless.toys import Toy, toy_pair, toy_phases, with_reading
from specdec_jax.types import Monitor, StoppingPolicy, Verifier

TOLERANCE = 1e-6  # lossless rules have errors below 1e-12
WARPS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.0},
)
PHASES, UNWATCHED = toy_phases(), no_monitor()  # created once, so that compiled functions are reused
TOYS = (toy_pair(3, 0), with_reading(toy_pair(3, 1)), toy_pair(3, 2, distance=0.0))


class Case(NamedTuple):
    """One enumeration."""

    toy: int  # index of its toy pair
    warp: Mapping[str, Any]
    batch: int
    chosen: bool  # whether the drafter chose its tokens (one-hot distributions) instead of drawing them
    total_variation: float
    draft_lengths: tuple[int, ...]  # lengths that occurred
    distribution: np.ndarray | None = None  # [V] * tokens float64, of the emitted tokens
    counterexample: Counterexample | None = None


class LosslessReport(NamedTuple):
    """The worst total variation between the output distribution and the target's over all cases."""

    total_variation: float
    lossless: bool  # total_variation < TOLERANCE
    draft_lengths: tuple[int, ...]  # lengths that occurred: a rule that never drafts proves nothing
    cases: tuple[Case, ...]


def prove_exactly(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    monitor: Monitor | None = None,
    max_draft_length: int = 2,
    tokens: int = 3,
    batches: Sequence[int] = (1, 3),
    warps: Sequence[Mapping[str, Any]] = WARPS,
    toys: Sequence[Toy] = TOYS,
    chosen: Sequence[bool] = (False, True),
) -> LosslessReport:
    """The exact distribution of the first `tokens` emitted tokens against the target's, over all the given cases.

    Args:
        monitor: default: phases that change with every token if policy or verifier reads phases, else none.
        batches: numbers of rows per call of policy and verifier; they mix different texts and states.
        warps: arguments of `make_warp`; a verifier for greedy decoding is tested with those at temperature 0.
        toys: pairs of models; the default has one whose drafter reads its target, and one whose drafter equals
            it, where residuals are 0/0.
        chosen: drafters that draw their tokens (False), and that choose them (True: one-hot distributions).

    Raises:
        ValueError: no warp is left.
    """
    warps, monitor = warps_for(verifier, warps), monitor or monitor_for(policy, verifier)
    cases = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for index, toy in enumerate(toys):
            for warp in warps:
                strategies = policy, verifier, monitor
                every = setting_of(*strategies, max_draft_length, warp, [toy], tokens=tokens, limit=tokens + 1)
                for batch, one_hot in itertools.product(batches, chosen):
                    setting = every._replace(batch=batch, chosen=one_hot, tally=Tally(max_draft_length))
                    joint, goal = enumerate_distribution(setting, first_nodes(setting)), target_joint(setting)
                    distance = float(0.5 * np.abs(joint - goal).sum())
                    distance = distance if np.isfinite(distance) else np.inf
                    lengths, wrong = setting.tally.coverage.draft_lengths, None
                    if (example := first_wrong(joint, goal, TOLERANCE)) is not None:
                        wrong = Counterexample("all rounds", (0, 1), warp, example[0], len(example[0]), *example[1:])
                    cases.append(Case(index, warp, batch, one_hot, distance, lengths, joint, wrong))
    worst = max(case.total_variation for case in cases)
    lengths = tuple(sorted({length for case in cases for length in case.draft_lengths}))
    return LosslessReport(worst, worst < TOLERANCE, lengths, tuple(cases))


def warps_for(verifier: Verifier, warps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The warps that the verifier supports.

    Raises:
        ValueError: none is left.
    """
    left = [warp for warp in warps if not (verifier.greedy_only and warp["temperature"] > 0)]
    if not left:
        raise ValueError("this verifier is for temperature 0 only, and no such warp is given")
    return left


def monitor_for(policy: StoppingPolicy, verifier: Verifier) -> Monitor:
    """Phases that change with every token if policy or verifier reads phases, else no monitor."""
    return PHASES if policy.needs_phases or verifier.needs_phases else UNWATCHED
