"""Cost model of rounds from a table of measured passes, for replays and for policies that weigh costs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from specdec_jax.loading.new_folder import write_text
from specdec_jax.ranges import Between, ranges_of
from specdec_jax.types import Statistics

LEAST_SHARE = 0.25  # a pass with fewer slots costs at least this share of the measured one
AGREE = 1.35  # maximum ratio of two measurements of the same work
LEAST_ROUNDS = 16  # minimum number of rounds for a reliable time per round


class CostModel(NamedTuple):
    """Seconds (or any unit of time) of a drafter step and of a target pass by width, for one device and batch."""

    drafter_step: Annotated[float, Between(0)]
    widths: Annotated[tuple[int, ...], Between(1)]  # ascending
    target_pass: Annotated[tuple[float, ...], Between(0, open="low")]  # one per width
    plain_pass: Annotated[float, Between(0, open="low")]  # time of a pass of plain decoding
    device: str = ""
    batch: Annotated[int, Between(1)] = 1
    slots: Annotated[int, Between(0)] = 0  # cache slots per row in the measurement; 0: unknown
    slot_time: Annotated[float, Between(0)] = 0.0  # additional time of a target pass per slot
    doubts: tuple[str, ...] = ()  # a clause for each sign that the machine was busy during the measurement

    @property
    def ratio(self) -> float:
        """c, the time of a drafter step relative to a pass of plain decoding."""
        return self.drafter_step / self.plain_pass

    def at(self, slots: int) -> "CostModel":
        """The costs with `slots` cache slots per row. Attention in a batch reads all of them at any width."""
        if not self.slot_time:
            return self
        extra = max((slots - self.slots) * self.slot_time, (LEAST_SHARE - 1) * self.plain_pass)
        passes = tuple(time + extra for time in self.target_pass)
        return self._replace(plain_pass=self.plain_pass + extra, target_pass=passes, slots=slots)

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
    """A cost model from times by width. Times are made non-decreasing in the width.

    Args:
        drafter_step: 0 for drafters without a model.
        plain_pass: time of a pass of plain decoding; default: that of the narrowest width.
        others: further fields of `CostModel`.

    Raises:
        ValueError: no widths, or times that are not positive.
    """
    widths = tuple(sorted(int(width) for width in target_pass))
    passes = tuple(float(target_pass[width]) for width in sorted(target_pass))
    plain = float(next(iter(passes), 0) if plain_pass is None else plain_pass)
    costs = CostModel(float(drafter_step), widths, passes, plain, **others)
    for name, within in ranges_of(CostModel).items():
        within.check(name, getattr(costs, name))
    return costs._replace(target_pass=tuple(np.maximum.accumulate(passes).tolist()), doubts=tuple(costs.doubts))


def flat(ratio: float, max_draft_length: int) -> CostModel:
    """The costs of a machine whose pass time is independent of the width, with drafter steps of `ratio` passes."""
    return cost_model(ratio, {1: 1.0, max_draft_length + 1: 1.0})


def between(model: CostModel, widths: Sequence[int]) -> CostModel:
    """The same machine with other verification widths, with interpolated times.

    Beyond the widest width they are extrapolated linearly from the last two.
    """
    times = np.interp(widths, model.widths, model.target_pass)
    if len(model.widths) > 1:
        (low, high), (before, last) = model.widths[-2:], model.target_pass[-2:]
        times = times + np.maximum(np.asarray(widths) - high, 0) * (last - before) / (high - low)
    return model._replace(widths=tuple(widths), target_pass=tuple(float(time) for time in times))


def agree(first: float, second: float) -> bool:
    """Whether two times are consistent with the same work on the same machine."""
    return 1 / AGREE <= first / second <= AGREE


def decoding_seconds(costs: CostModel, counts: Statistics) -> float | None:
    """The predicted time of the rounds of a row decoded alone, without the policy's own computation.

    Args:
        counts: counts of the state; without drafts the rounds are those of plain decoding.

    Returns:
        None if the counts do not determine the widths: for several rows, and for drafts that are not chains.
    """
    if len(counts.num_rounds) != 1 or counts.num_draft_tokens[0] != np.sum(counts.drafted_at[0]):
        return None
    longest = counts.drafted_at.shape[1]
    at_least = np.concatenate([np.asarray(counts.num_rounds), np.asarray(counts.drafted_at)[0], [0]])  # k drafts
    times = costs.pass_times(longest) if longest else np.array([costs.plain_pass])
    return float(-np.diff(at_least) @ times + int(counts.drafter_passes[0]) * costs.drafter_step)


def disagreement(costs: CostModel, counts: Statistics, seconds: float) -> str | None:
    """A clause if the rounds took much more or less time than predicted; None if they agree or are too few."""
    expected = decoding_seconds(costs, counts)
    if expected is None or int(counts.num_rounds[0]) < LEAST_ROUNDS or agree(seconds, expected):
        return None
    return f"decoding took {seconds:.2f} s where these costs predict {expected:.2f}"


def save_cost_model(path: str | Path, model: CostModel) -> None:
    """Writes JSON atomically."""
    write_text(path, json.dumps(model._asdict(), indent=2) + "\n")


def load_cost_model(path: str | Path) -> CostModel:
    """Reads a file of `save_cost_model` (`python -m experiments.step_cost` writes one as cost_model.json).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a cost model; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no cost model {str(path)!r}; python -m experiments.step_cost writes one")
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, within in ranges_of(CostModel).items():
            within.check(name, fields[name] if name not in CostModel._field_defaults else fields.get(name, within.low))
        passes = dict(zip(fields.pop("widths"), fields.pop("target_pass"), strict=True))
        others = {name: fields[name] for name in CostModel._fields if name in fields}
        return cost_model(others.pop("drafter_step"), passes, **others)
    except (KeyError, TypeError, ValueError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a cost model: {lacking}") from None
