"""Speed-ups of `generate` with different stopping policies, predicted by replaying a trace of a pair.

Every policy gets the same inputs as in decoding: the pair's costs and calibrated hyperparameters. The rounds of a
replay have the distribution of live ones (`replay/replay.py`); their time is predicted by the cost model.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.costs.cost_model import CostModel, flat
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.phase_path import phase_path
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace
from specdec_jax.stopping.static import static
from specdec_jax.text.calibration import Calibration
from specdec_jax.text.generation import learnt_hyperparameters
from specdec_jax.text.pair import PHASES, Pair
from specdec_jax.text.strategies import build, names
from specdec_jax.types import StoppingPolicy


class Predicted(NamedTuple):
    """The predictions for a policy over the texts of a trace."""

    policy: StoppingPolicy
    speedup: Interval  # over plain decoding, of total times
    break_even: float  # c at which these rounds would take as long as plain decoding; NaN: no drafts
    seconds: np.ndarray  # [N] float64, time of each text
    tokens: float  # emitted tokens per round
    drafted: float  # drafted tokens per round
    acceptance_rate: float  # accepted over drafted tokens; NaN: nothing was drafted


def every_rule(longest: int) -> list[StoppingPolicy]:
    """The policies of stopping/ with default options, except wrappers, and static lengths of 1 to longest.

    Policies of chains only: trees are verified in other widths (docs/combs.md).
    """
    built = [build("policy", name, {}) for name in names("policy") if name != static().name]
    plain = [rule for rule in built if not any(isinstance(part, StoppingPolicy) for part in rule.options.values())]
    plain = [rule for rule in plain if rule.drafts_chains]
    return [*plain, *(static(draft_length=length) for length in range(1, longest + 1))]


def costs_counted(pair: Pair) -> CostModel:
    """The pair's costs; if they are estimated, c by the bytes read and a pass time independent of the width."""
    if pair.costs is not None:
        return pair.costs
    return flat(pair.drafter_cost or 0.0, pair.decoder.parts.drafter.max_draft_length)


def predicted(
    pair: Pair, trace: Trace, rule: StoppingPolicy, slots: int, calibration: Calibration | str | None = None
) -> Predicted:
    """The predictions for a policy over a trace of the pair, with `slots` cache slots. Raises as `replay`."""
    costs, longest = costs_counted(pair), pair.decoder.parts.drafter.max_draft_length
    watched = pair._replace(policy=rule, monitor=PHASES if rule.needs_phases else None)
    temperature = float(trace.temperature.max())
    learnt = learnt_hyperparameters(watched, calibration, temperature, slots)
    phases = phase_path(trace, **learnt.get("monitor_hyperparameters", {})) if rule.needs_phases else None
    # `replay` interprets a vector as one value per setting: here it is one setting.
    values = learnt.get("policy_hyperparameters", {}).items()
    hyperparameters = {name: np.asarray(value)[None] if np.ndim(value) else value for name, value in values}
    replayed = replay(trace, rule, hyperparameters, max_draft_length=longest, phases=phases)
    costs = costs.at(slots, temperature=temperature)
    step, costs = costs.drafter_step, costs.at(policy=rule)  # a pass without the rule's computation
    seconds, plain = replayed.seconds(costs)[0], replayed.emitted[0] * costs.plain_pass
    passes, rounds, drafted = (int(counts.sum()) for counts in (replayed.passes, replayed.rounds, replayed.drafted))
    spared = plain.sum() - (seconds.sum() - passes * step)
    return Predicted(
        policy=rule,
        speedup=ratio_of_totals(plain, seconds),
        break_even=float(spared / (passes * costs.plain_pass)) if passes else float("nan"),
        seconds=seconds,
        tokens=float(replayed.tokens_per_round[0]),
        drafted=drafted / rounds,
        acceptance_rate=float(replayed.acceptance_rate[0]) if drafted else float("nan"),
    )


def faster(first: Predicted, other: Predicted) -> Interval:
    """The ratio of speeds of two policies on the same texts, of total times, with a paired interval."""
    return ratio_of_totals(other.seconds, first.seconds)


def as_fast(predictions: Sequence[Predicted]) -> list[bool]:
    """Whether each policy is the fastest one, or not significantly slower."""
    best = max(predictions, key=lambda prediction: prediction.speedup.estimate)
    return [prediction is best or not faster(prediction, best).high < 1 for prediction in predictions]
