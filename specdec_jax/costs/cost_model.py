"""Cost model of rounds from a table of measured passes, for replays and for policies that weigh costs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from specdec_jax.loading.new_folder import write_text
from specdec_jax.ranges import Between, ranges_of
from specdec_jax.types import Statistics, StoppingPolicy

LEAST_SHARE = 0.25  # a pass with fewer slots costs at least this share of the measured one
AGREE = 1.35  # maximum ratio of two measurements of the same work
SAME_PASS = 1.1  # maximum ratio of two measured passes of plain decoding of one target
PASSES = "target_pass", "sampled_pass"  # fields of `CostModel` with a time per width


class RuleCost(NamedTuple):
    """Seconds that a stopping policy's own computation adds to a drafter pass and to a round."""

    policy: str  # repr of its `bare`: hyperparameters do not change its program
    step: float
    round: float
    sampled_step: float  # at temperatures above 0
    sampled_round: float


NO_RULE = RuleCost("", 0.0, 0.0, 0.0, 0.0)


class CostModel(NamedTuple):
    """Seconds (or any unit of time) of a drafter step and of a target pass by width, for one device and batch.

    A target pass is a round without its drafter steps: a constant, such as a drafter's first pass over accepted tokens,
    is part of it. Without measurements above temperature 0 the greedy ones serve for all temperatures.
    """

    drafter_step: Annotated[float, Between(0)]
    widths: Annotated[tuple[int, ...], Between(1)]  # ascending
    target_pass: Annotated[tuple[float, ...], Between(0, open="low")]  # one per width
    plain_pass: Annotated[float, Between(0, open="low")]  # time of a pass of plain decoding
    device: str = ""
    batch: Annotated[int, Between(1)] = 1
    slots: Annotated[int, Between(0)] = 0  # cache slots per row in the measurement; 0: unknown
    slot_time: Annotated[float, Between(0)] = 0.0  # additional time of a target pass per slot
    doubts: tuple[str, ...] = ()  # a clause for each sign that the machine was busy during the measurement
    sampled_step: Annotated[float, Between(0)] = 0.0  # `drafter_step` at temperatures above 0, without truncation
    sampled_pass: tuple[float, ...] = ()  # `target_pass`, likewise; (): not measured
    sampled_plain: Annotated[float, Between(0)] = 0.0  # `plain_pass`, likewise
    rules: tuple[RuleCost, ...] = ()  # of the policies that were measured

    def left_out(self, temperature: float) -> str:
        """A clause on what predictions at this temperature leave out, since it was not measured."""
        names = [rule.policy for rule in self.rules]
        measured = ", ".join(names) if len(names) < 4 else f"{len(names)} rules"
        counted = f"only counted for {measured}" if measured else "not counted"
        clauses = [f"the rules' own computation is {counted}"]
        if temperature > 0 and not self.sampled_plain:
            clauses.insert(0, "sampled passes are taken to last as long as greedy ones")
        return " and ".join(clauses)

    @property
    def ratio(self) -> float:
        """c, the time of a drafter step relative to a pass of plain decoding."""
        return self.drafter_step / self.plain_pass

    def at(
        self, slots: int | None = None, *, temperature: float = 0.0, policy: StoppingPolicy | None = None
    ) -> "CostModel":
        """The costs of rounds with `slots` cache slots per row, at a temperature, with a policy's own computation.

        Attention in a batch reads all slots at any width. A policy that was not measured adds nothing.
        """
        model = self
        if temperature > 0 and self.sampled_pass:
            rules = tuple(rule._replace(step=rule.sampled_step, round=rule.sampled_round) for rule in self.rules)
            model = self._replace(drafter_step=self.sampled_step, target_pass=self.sampled_pass, sampled_pass=())
            model = model._replace(plain_pass=self.sampled_plain, rules=rules)
        if policy is not None:
            added = next((rule for rule in model.rules if rule.policy == repr(policy.bare)), NO_RULE)
            passes = tuple(time + added.round for time in model.target_pass)
            model = model._replace(drafter_step=model.drafter_step + added.step, target_pass=passes, rules=())
        if not self.slot_time or slots is None:
            return model
        extra = max((slots - self.slots) * self.slot_time, (LEAST_SHARE - 1) * model.plain_pass)
        passes = tuple(time + extra for time in model.target_pass)
        return model._replace(plain_pass=model.plain_pass + extra, target_pass=passes, slots=slots)

    def pass_times(self, max_draft_length: int) -> np.ndarray:
        """[K+1] float64: time to verify k drafts, in the narrowest width that holds them and the token before.

        Raises ValueError: drafts that do not fit the widest width.
        """
        if max_draft_length + 1 > self.widths[-1]:
            raise ValueError(
                f"the cost model's widest pass is {self.widths[-1]} tokens and cannot verify {max_draft_length} drafts"
            )
        chosen = np.searchsorted(self.widths, np.arange(max_draft_length + 1) + 1)
        return np.asarray(self.target_pass, np.float64)[chosen]

    def verification_times(self, max_draft_length: int) -> np.ndarray:
        """[K+1] float64: `pass_times` in passes of plain decoding, the unit of policies. Raises as `pass_times`."""
        return self.pass_times(max_draft_length) / self.plain_pass


def cost_model(
    drafter_step: float, target_pass: Mapping[int, float], *, plain_pass: float | None = None, **others: Any
) -> CostModel:
    """A cost model from times by width, which are made non-decreasing in the width.

    `drafter_step` is 0 for drafters without a model, `plain_pass` by default the time of the narrowest width; `others`
    are further fields. Raises ValueError: no widths, or times that are not positive.
    """
    widths = tuple(sorted(int(width) for width in target_pass))
    passes = tuple(float(target_pass[width]) for width in sorted(target_pass))
    plain = float(next(iter(passes), 0) if plain_pass is None else plain_pass)
    costs = CostModel(float(drafter_step), widths, passes, plain, **others)
    for name, within in ranges_of(CostModel).items():
        within.check(name, getattr(costs, name))
    sampled = costs.sampled_plain, *costs.sampled_pass
    if costs.sampled_pass and not (len(sampled) == len(widths) + 1 and min(sampled) > 0):
        raise ValueError(f"sampled_plain and sampled_pass need 1 and {len(widths)} times above 0, got {sampled}")
    rising = {name: tuple(np.maximum.accumulate(getattr(costs, name)).tolist()) for name in PASSES}
    return costs._replace(**rising, doubts=tuple(costs.doubts), rules=tuple(RuleCost(*rule) for rule in costs.rules))


def flat(ratio: float, max_draft_length: int) -> CostModel:
    """The costs of a machine whose pass time is independent of the width, with drafter steps of `ratio` passes."""
    return cost_model(ratio, {1: 1.0, max_draft_length + 1: 1.0})


def between(model: CostModel, widths: Sequence[int]) -> CostModel:
    """The same machine with other verification widths, with interpolated times.

    Beyond the widest width they are extrapolated linearly from the last two.
    """

    def at_widths(measured: Sequence[float]) -> tuple[float, ...]:
        times = np.interp(widths, model.widths, measured)
        if len(model.widths) > 1:
            (low, high), (before, last) = model.widths[-2:], measured[-2:]
            times = times + np.maximum(np.asarray(widths) - high, 0) * (last - before) / (high - low)
        return tuple(times.tolist())

    passes = {name: at_widths(times) for name in PASSES if (times := getattr(model, name))}
    return model._replace(widths=tuple(widths), **passes)


def agree(first: float, second: float) -> bool:
    """Whether two times are consistent with the same work on the same machine."""
    return 1 / AGREE <= first / second <= AGREE


def passes_disagree(models: Iterable[tuple[Any, CostModel]]) -> str | None:
    """A clause if passes of plain decoding of one target took different times; `models` are (target, costs)."""
    times: dict[Any, list[float]] = {}
    for target, model in models:
        times.setdefault(target, []).append(model.plain_pass)
    for each in times.values():
        if max(each) > SAME_PASS * min(each):
            return f"passes of plain decoding of one target took {1e3 * min(each):.2f} and {1e3 * max(each):.2f} ms"
    return None


def decoding_seconds(costs: CostModel, counts: Statistics) -> float | None:
    """The predicted time of the rounds of a row decoded alone, by costs `at` its temperature and policy.

    Without drafts the rounds are those of plain decoding. None if the counts do not determine the widths: for several
    rows, and for drafts that are not chains.
    """
    if len(counts.num_rounds) != 1 or counts.num_draft_tokens[0] != np.sum(counts.drafted_at[0]):
        return None
    longest = counts.drafted_at.shape[1]
    at_least = np.concatenate([np.asarray(counts.num_rounds), np.asarray(counts.drafted_at)[0], [0]])  # k drafts
    times = costs.pass_times(longest) if longest else np.array([costs.plain_pass])
    return float(-np.diff(at_least) @ times + int(counts.drafter_passes[0]) * costs.drafter_step)


def save_cost_model(path: str | Path, model: CostModel) -> None:
    """Writes JSON atomically."""
    write_text(path, json.dumps(model._asdict(), indent=2) + "\n")


def load_cost_model(path: str | Path) -> CostModel:
    """Reads a file of `save_cost_model`. Raises FileNotFoundError, or ValueError naming one that is no cost model."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no cost model {str(path)!r}; python -m experiments.step_cost writes one")
    try:
        return cost_model_of(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a cost model: {lacking}") from None


def cost_model_of(fields: Mapping[str, Any]) -> CostModel:
    """The cost model of a JSON object. Raises KeyError, TypeError, ValueError if it is none."""
    for name, within in ranges_of(CostModel).items():
        within.check(name, fields[name] if name not in CostModel._field_defaults else fields.get(name, within.low))
    passes = dict(zip(fields["widths"], fields["target_pass"], strict=True))
    others = {name: fields[name] for name in CostModel._fields[3:] if name in fields}
    return cost_model(fields["drafter_step"], passes, **others)
