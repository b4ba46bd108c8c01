"""The phases of a trace's texts: the output of the monitor `phases` before every position, without a model.

A phase is a function of the emitted tokens only, so it does not depend on the replayed policy. By default the monitor
and the functions here use the target's raw entropy; with `raw_entropy=False` that of the sampled distribution.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.monitors.phases import Phases, observe_token, phases
from specdec_jax.replay.trace import Trace
from specdec_jax.types import Array

ENTER, LEAVE = 60.0, 40.0  # percentiles of the running entropy, used without a calibration


def phase_path(trace: Trace, raw_entropy: bool = True, **hyperparameters: Any) -> np.ndarray:
    """The phase [N, T+1] int32 of a round that begins at each position. `hyperparameters` are those of `phases`.

    Raises ValueError: hyperparameters that `phases` refuses.
    """
    return _watched(trace, raw_entropy, hyperparameters)[0]


def running_entropy(trace: Trace, decay: float = 0.9, raw_entropy: bool = True) -> np.ndarray:
    """The monitor's running mean [N, T+1] float32, nats, before each position; NaN where it is not defined."""
    running = _watched(trace, raw_entropy, {"decay": decay})[1]
    at = np.arange(running.shape[1])[None, :]
    return np.where((at > 0) & (at < trace.length[:, None]), running, np.nan)


def percentile_thresholds(trace: Trace, decay: float = 0.9) -> dict[str, float]:
    """`enter` and `leave` at fixed percentiles of the texts' running entropy, independent of acceptance."""
    leave, enter = np.nanpercentile(running_entropy(trace, decay), [LEAVE, ENTER])
    return {"enter": float(enter), "leave": float(leave), "decay": decay}


def _watched(trace: Trace, raw_entropy: bool, hyperparameters: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    entropies = trace.raw_target_entropy if raw_entropy else trace.target_entropy
    begun = jax.tree.map(jnp.asarray, phases().init(len(entropies), **hyperparameters))

    def observe(state: Phases, entropy: Array) -> tuple[Phases, tuple[Array, Array]]:
        return observe_token(state, entropy), (state.phase, state.entropy)

    _, (phase, running) = lax.scan(observe, begun, jnp.asarray(np.nan_to_num(entropies.T, nan=0.0)))
    return np.asarray(phase.T), np.asarray(running.T)
