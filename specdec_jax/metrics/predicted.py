"""Speed-ups of stopping rules, predicted by replaying a trace of a pair: what `generate` would gain by each of them.

Every rule gets what it would get live: the pair's costs, and what a calibration has learnt. A replay's rounds
have the distribution of live ones (`replay/replay.py`); their time is the cost model's, and so a prediction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.costs.cost_model import CostModel, flat
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.phase_path import phase_path
from specdec_jax.replay.replay import Replay, replay
from specdec_jax.replay.trace import Trace
from specdec_jax.stopping.static import static
from specdec_jax.text.calibration import Calibration
from specdec_jax.text.generation import learnt_hyperparameters
from specdec_jax.text.pair import PHASES, Pair
from specdec_jax.text.strategies import build, names
from specdec_jax.types import StoppingPolicy


class Predicted(NamedTuple):
    """A rule over the texts of a trace."""

    policy: StoppingPolicy
    speedup: Interval  # over plain decoding, total over total
    break_even: float  # c at which these rounds would take as long as plain decoding; NaN: it never drafted
    seconds: np.ndarray  # [N] float64, of each text
    tokens: float  # a round
    drafted: float  # a round
    acceptance_rate: float  # accepted over drafted tokens; NaN: nothing was drafted


def every_rule(longest: int) -> list[StoppingPolicy]:
    """The files of stopping/ at their defaults, but those that only wrap others, and static lengths of 1 to longest.

    Rules of chains: trees are verified in other widths (docs/combs.md).
    """
    built = [build("policy", name, {}) for name in names("policy") if name != static().name]
    plain = [rule for rule in built if not any(isinstance(part, StoppingPolicy) for part in rule.options.values())]
    plain = [rule for rule in plain if rule.rounds is None]
    return [*plain, *(static(draft_length=length) for length in range(1, longest + 1))]


def costs_counted(pair: Pair) -> CostModel:
    """The pair's costs; where they are estimated, c by the bytes read and a verification that is free in its width."""
    if pair.costs is not None:
        return pair.costs
    return flat(pair.drafter_cost or 0.0, pair.decoder.parts.drafter.max_draft_length)


def predicted(
    pair: Pair, trace: Trace, rule: StoppingPolicy, slots: int, calibration: Calibration | str | None = None
) -> Predicted:
    """A rule over a trace of that pair, its texts decoded in so many cache slots. Raises ValueError as `replay`."""
    costs, longest = costs_counted(pair), pair.decoder.parts.drafter.max_draft_length
    watched = pair._replace(policy=rule, monitor=PHASES if rule.needs_phases else None)
    learnt = learnt_hyperparameters(watched, calibration, float(trace.temperature.max()), slots)
    phases = phase_path(trace, **learnt.get("monitor_hyperparameters", {})) if rule.needs_phases else None
    # `replay` takes a vector for as many settings as it is long: here it is one.
    values = learnt.get("policy_hyperparameters", {}).items()
    hyperparameters = {name: np.asarray(value)[None] if np.ndim(value) else value for name, value in values}
    replayed = replay(trace, rule, hyperparameters, max_draft_length=longest, phases=phases)
    return _summed(rule, replayed, costs.at(slots))


def faster(first: Predicted, other: Predicted) -> Interval:
    """How many times as fast one rule is as another on the same texts, total over total, with a paired interval."""
    return ratio_of_totals(other.seconds, first.seconds)


def as_fast(predictions: Sequence[Predicted]) -> list[bool]:
    """Whether each rule is as fast as the best of them, or no slower that these texts could show."""
    best = max(predictions, key=lambda prediction: prediction.speedup.estimate)
    return [prediction is best or not faster(prediction, best).high < 1 for prediction in predictions]


def _summed(rule: StoppingPolicy, replayed: Replay, costs: CostModel) -> Predicted:
    seconds, plain = replayed.seconds(costs)[0], replayed.emitted[0] * costs.plain_pass
    passes, rounds, drafted = (int(counts.sum()) for counts in (replayed.passes, replayed.rounds, replayed.drafted))
    spared = plain.sum() - (seconds.sum() - passes * costs.drafter_step)
    return Predicted(
        policy=rule,
        speedup=ratio_of_totals(plain, seconds),
        break_even=float(spared / (passes * costs.plain_pass)) if passes else float("nan"),
        seconds=seconds,
        tokens=float(replayed.tokens_per_round[0]),
        drafted=drafted / rounds,
        acceptance_rate=float(replayed.acceptance_rate[0]) if drafted else float("nan"),
    )
