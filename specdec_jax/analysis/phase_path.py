"""The phases of a trace's texts: what the monitor `phases` says before every position, without a model.

A phase is a function of the emitted tokens alone, so it is the same whatever rule is replayed. Traces keep the target's
entropy as sampled; at temperature 0 that is the raw one, which the monitor reads unless told otherwise.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.analysis.trace import Trace
from specdec_jax.monitors.phases import observe_token, phases
from specdec_jax.types import Array, Phases

ENTER, LEAVE = 60.0, 40.0  # percentiles of the running entropy, where no calibration is given


def phase_path(trace: Trace, **numbers: Any) -> np.ndarray:
    """[N, T+1] int32, the phase in which a round at each position begins. `numbers` are those of `phases`."""
    return _watched(trace, numbers)[0]


def running_entropy(trace: Trace, decay: float = 0.9) -> np.ndarray:
    """[N, T+1] float32, nats, the monitor's running mean before each position; NaN where a text has none."""
    running = _watched(trace, {"decay": decay})[1]
    at = np.arange(running.shape[1])[None, :]
    return np.where((at > 0) & (at < trace.length[:, None]), running, np.nan)


def percentile_thresholds(trace: Trace, decay: float = 0.9) -> dict[str, float]:
    """enter and leave at fixed percentiles of the texts' own running entropy; no acceptance is looked at."""
    leave, enter = np.nanpercentile(running_entropy(trace, decay), [LEAVE, ENTER])
    return {"enter": float(enter), "leave": float(leave), "decay": decay}


def _watched(trace: Trace, numbers: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    begun = jax.tree.map(jnp.asarray, phases().init(trace.num_texts, **numbers))
    entropies = np.nan_to_num(trace.target_entropy, nan=0.0)

    def one(state: Phases, entropy: Array) -> tuple[Phases, tuple[Array, Array]]:
        return observe_token(state, entropy), (state.phase, state.entropy)

    _, (phase, running) = lax.scan(one, begun, jnp.asarray(entropies.T))
    return np.asarray(phase.T), np.asarray(running.T)
