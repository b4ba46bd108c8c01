"""The training loop, with metrics and checkpoints, from which it can resume."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
from jax.experimental import multihost_utils

from specdec_jax.distillation.batches import Batch, BatchOrder
from specdec_jax.distillation.checkpoints import Checkpoints
from specdec_jax.distillation.training import Metrics, TrainState
from specdec_jax.loading.new_folder import replacing
from specdec_jax.ranges import Between, check_fields
from specdec_jax.text.json_lines import json_text

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Intervals:
    """Intervals of output. `minutes`: saves and returns after this time (0: no limit). Raises ValueError."""

    save_every: Annotated[int, Between(1)] = 100
    log_every: Annotated[int, Between(1)] = 10
    keep: Annotated[int, Between(1)] = 2
    minutes: Annotated[float, Between(0)] = 0.0

    def __post_init__(self):
        check_fields(self)


def train(
    folder: str | Path,
    state: TrainState,
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    order: BatchOrder,
    steps: int,
    intervals: Intervals = Intervals(),  # noqa: B008 - frozen
    progress: Callable[[int, dict[str, float]], None] | None = None,
    validate: Callable[[TrainState], dict[str, float]] | None = None,
) -> TrainState:
    """Trains from the newest checkpoint in `folder`/checkpoints (or from `state`) to `steps`, and saves the last state.

    Every `log_every` steps a line of means is written to metrics.jsonl, by the first of several processes; lines after
    the resumed checkpoint are dropped, because their steps are repeated. `progress(step, means)` is called with each
    line; the results of `validate(state)` are added to the lines of saved steps. Raises FloatingPointError if the loss
    is not finite, OSError and ValueError as checkpoints do.
    """
    folder = Path(folder)
    checkpoints = Checkpoints(folder / "checkpoints", keep=intervals.keep)
    try:
        first = checkpoints.latest() or 0
        if first:
            state = checkpoints.restore(first, state)
        if jax.process_index() == 0:  # it writes what all share
            keep_metrics(folder / METRICS, first)
        ends, lines, since = time.monotonic() + 60 * intervals.minutes, [], time.monotonic()
        batch, at = order.at(first) if first < steps else None, first
        while batch is not None:
            state, metrics = step(state, batch)
            batch = order.at(at + 1) if at + 1 < steps else None  # prepared while the device computes
            at += 1
            lines.append(metrics)
            over = bool(intervals.minutes) and time.monotonic() > ends
            if intervals.minutes and jax.process_count() > 1:  # the first process decides for all
                over = bool(multihost_utils.broadcast_one_to_all(over))
            saves = at % intervals.save_every == 0 or batch is None or over
            if at % intervals.log_every == 0 or saves:
                jax.block_until_ready(lines)
                means = _means(lines, time.monotonic() - since, order.epoch_of(at))
                if saves:  # before the validation: a process that is killed while that compiles loses no step
                    checkpoints.save(at, state)
                    means |= {} if validate is None else validate(state)
                lines, since = [], time.monotonic()
                if jax.process_index() == 0:  # it writes what all share
                    _log(folder / METRICS, at, means)
                if progress is not None:
                    progress(at, means)
            if over:
                break
        return state
    finally:
        checkpoints.close()


def keep_metrics(path: Path, last: int) -> None:
    """Drops the lines after step `last`, and an incomplete one."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    until_last = [line for line in lines if json.loads(line)["step"] <= last]
    with replacing(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in until_last), encoding="utf-8")


def _means(lines: list[Metrics], seconds: float, epoch: float) -> dict[str, float]:
    """Means over some steps, and steps per second."""
    host = [jax.tree.map(float, line)._asdict() for line in lines]
    means = {name: sum(line[name] for line in host) / len(host) for name in host[0]}
    if not means["loss"] == means["loss"] or abs(means["loss"]) == float("inf"):
        raise FloatingPointError(f"the loss is {means['loss']}: lower the rate, or raise the warmup")
    return means | {"epoch": epoch, "steps_per_second": len(host) / seconds}


def _log(path: Path, step: int, means: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json_text({"step": step} | {name: float(f"{value:.6g}") for name, value in means.items()}) + "\n")
