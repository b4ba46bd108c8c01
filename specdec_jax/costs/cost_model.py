"""What rounds cost in time, from a table of measured passes: the clock of a replay, and what rules weigh."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.loading.new_folder import replacing
from specdec_jax.types import Statistics

LISTS, OPTIONAL = ("widths", "target_pass"), ("slots", "slot_time")
NUMBERS = (
    *((name, 0, (int, float)) for name in ("drafter_step", "plain_pass", "target_pass", "slot_time")),
    *((name, least, int) for name, least in (("widths", 1), ("batch", 1), ("slots", 0))),
)
"""The entries of a file: name, least value, type."""
LEAST_SHARE = 0.25  # a pass with fewer slots costs at least this share of the measured one
AGREE = 1.35  # factor by which two measurements of the same work may differ
LEAST_ROUNDS = 16  # a shorter text says too little about the time of a round


class CostModel(NamedTuple):
    """Seconds (or any unit of time) of a drafter step and of a target pass by width, for one device and batch."""

    drafter_step: float
    widths: tuple[int, ...]  # ascending
    target_pass: tuple[float, ...]  # one a width
    plain_pass: float  # of a pass of plain decoding
    device: str = ""
    batch: int = 1
    slots: int = 0  # cache slots of a row that passes were measured with; 0: not known
    slot_time: float = 0.0  # what one more of them adds to every target pass
    doubts: tuple[str, ...] = ()  # a clause for each sign that the machine was busy when this was measured

    @property
    def ratio(self) -> float:
        """c, a drafter step over a pass of plain decoding."""
        return self.drafter_step / self.plain_pass

    def at(self, slots: int) -> "CostModel":
        """The costs with that many cache slots a row. Attention in a batch reads all of them, whatever the width."""
        if not self.slot_time:
            return self
        extra = max((slots - self.slots) * self.slot_time, (LEAST_SHARE - 1) * self.plain_pass)
        passes = tuple(time + extra for time in self.target_pass)
        return self._replace(plain_pass=self.plain_pass + extra, target_pass=passes, slots=slots)

    def pass_times(self, max_draft_length: int) -> np.ndarray:
        """[K+1] float64: the pass that verifies k drafts, in the narrowest width that holds them and the token before.

        Raises:
            ValueError: drafts longer than the widest width holds.
        """
        if max_draft_length + 1 > self.widths[-1]:
            raise ValueError(
                f"the cost model's widest pass is {self.widths[-1]} tokens and cannot verify {max_draft_length} drafts"
            )
        chosen = np.searchsorted(self.widths, np.arange(max_draft_length + 1) + 1)
        return np.asarray(self.target_pass, np.float64)[chosen]

    def verification_times(self, max_draft_length: int) -> np.ndarray:
        """[K+1] float64: `pass_times` in passes of plain decoding, the unit of rules. Raises as `pass_times`."""
        return self.pass_times(max_draft_length) / self.plain_pass


def cost_model(
    drafter_step: float,
    target_pass: Mapping[int, float],
    *,
    plain_pass: float | None = None,
    device: str = "",
    batch: int = 1,
    slots: int = 0,
    slot_time: float = 0.0,
    doubts: Sequence[str] = (),
) -> CostModel:
    """A cost model from times by width. A wider pass that was measured cheaper counts as its narrower neighbour.

    Args:
        drafter_step: 0 for drafts that cost no pass of a model.
        plain_pass: time of a pass of plain decoding; the narrowest width's unless given.
        slots, slot_time, doubts: as `CostModel` has them.

    Raises:
        ValueError: no widths, or times that are not positive.
    """
    widths = tuple(sorted(int(width) for width in target_pass))
    times = [float(target_pass[width]) for width in sorted(target_pass)]
    if not widths or widths[0] < 1:
        raise ValueError(f"a cost model needs widths of 1 or more, got {list(widths)}")
    plain = times[0] if plain_pass is None else float(plain_pass)
    if not (0 <= drafter_step < np.inf) or not all(np.isfinite(time) and time > 0 for time in (plain, *times)):
        raise ValueError(f"times must be positive, got drafter_step {drafter_step!r}, passes {times!r}")
    passes = tuple(float(time) for time in np.maximum.accumulate(times))
    return CostModel(float(drafter_step), widths, passes, plain, device, batch, slots, slot_time, tuple(doubts))


def flat(ratio: float, max_draft_length: int) -> CostModel:
    """A machine on which verification is free in its width and a drafter step is `ratio` of a target pass."""
    return cost_model(ratio, {1: 1.0, max_draft_length + 1: 1.0})


def between(model: CostModel, widths: Sequence[int]) -> CostModel:
    """The same machine with other verification widths, times interpolated between those measured.

    Beyond the widest the last two go on in a straight line.
    """
    times = np.interp(widths, model.widths, model.target_pass)
    if len(model.widths) > 1:
        (low, high), (before, last) = model.widths[-2:], model.target_pass[-2:]
        times = times + np.maximum(np.asarray(widths) - high, 0) * (last - before) / (high - low)
    return model._replace(widths=tuple(widths), target_pass=tuple(float(time) for time in times))


def agree(first: float, second: float) -> bool:
    """Whether two times may be of the same work on the same machine."""
    return 1 / AGREE <= first / second <= AGREE


def decoding_seconds(costs: CostModel, counts: Statistics) -> float | None:
    """What the rounds of a row that decoded alone take by these costs, without what the rule computes itself.

    Args:
        counts: of the state; without drafts the rounds are plain decoding's.

    Returns:
        None where counts do not tell the widths: of several rows, and of drafts that are no chains.
    """
    if len(counts.num_rounds) != 1 or counts.num_draft_tokens[0] != np.sum(counts.drafted_at[0]):
        return None
    longest = counts.drafted_at.shape[1]
    at_least = np.concatenate([np.asarray(counts.num_rounds), np.asarray(counts.drafted_at)[0], [0]])  # k drafts
    times = costs.pass_times(longest) if longest else np.array([costs.plain_pass])
    return float(-np.diff(at_least) @ times + int(counts.drafter_passes[0]) * costs.drafter_step)


def disagreement(costs: CostModel, counts: Statistics, seconds: float) -> str | None:
    """A clause on rounds that took much longer, or less, than these costs say; None where they agree or tell little."""
    expected = decoding_seconds(costs, counts)
    if expected is None or int(counts.num_rounds[0]) < LEAST_ROUNDS or agree(seconds, expected):
        return None
    return f"decoding took {seconds:.2f} s where these costs predict {expected:.2f}"


def save_cost_model(path: str | Path, model: CostModel) -> None:
    """Writes JSON, complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(model._asdict(), indent=2) + "\n", encoding="utf-8")


def load_cost_model(path: str | Path) -> CostModel:
    """Reads what `save_cost_model` wrote (and `python -m experiments.step_cost` writes as cost_model.json).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a cost model; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no cost model {str(path)!r}; python -m experiments.step_cost writes one")
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_numbers(fields)
        passes = dict(zip(fields["widths"], fields["target_pass"], strict=True))
        return cost_model(
            fields["drafter_step"],
            passes,
            plain_pass=fields["plain_pass"],
            device=str(fields["device"]),
            batch=fields["batch"],
            slots=fields.get("slots", 0),
            slot_time=fields.get("slot_time", 0.0),
            doubts=[str(doubt) for doubt in fields.get("doubts", ())],
        )
    except (KeyError, TypeError, ValueError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a cost model: {lacking}") from None


def _check_numbers(fields: Mapping[str, Any]) -> None:
    """Raises ValueError naming an entry that is no number, or out of range; KeyError for one that is missing."""
    for name, least, kind in NUMBERS:
        value = fields.get(name, 0) if name in OPTIONAL else fields[name]
        for number in value if name in LISTS else [value]:
            if not isinstance(number, kind) or isinstance(number, bool) or not least <= number < np.inf:
                wanted = "whole number" if kind is int else "number"
                raise ValueError(f"{name} must be a {wanted} of {least} or more, got {number!r}")
