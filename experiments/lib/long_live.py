"""Decoding on and on from one state, in windows: the live half of experiments.long_run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.lib.options import Served
from experiments.lib.smoke import tiny_pair
from specdec_jax.compilation_cache import enable
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import refuse_encoders
from specdec_jax.replay.long import LongRun, join_rounds
from specdec_jax.text.generation import encode
from specdec_jax.text.pair import measured_pair
from specdec_jax.types import DecodeState, StoppingPolicy


@dataclass(frozen=True)
class Live(Served):
    """A pair of models and what they go on about."""

    temperature: float = 0.7
    """Greedy decoding of a small target ends in a loop, and nothing is learnt from that."""
    prompt: str = "Write a long story about a lighthouse keeper."
    """What the text begins with."""
    window: int = 1024
    """Most tokens of context; when it is full, the last half begins the next window."""


def live_run(
    options: Live,
    policy: StoppingPolicy,
    hyperparameters: Mapping[str, Any],
    tokens: int,
    most: int,
    seed: int,
    smoke: bool,
) -> LongRun:
    """Decodes `tokens` tokens with every start of `hyperparameters["threshold"]` in a batch, ends of sequence ignored.

    Raises:
        ValueError: a window that the context or the prompt does not allow, or a model with an encoder.
    """
    if not smoke:
        refuse_encoders("long_run", options.target, options.drafter)
    enable()
    models = tiny_pair() if smoke else (options.target, options.drafter)
    pair = measured_pair(*models, policy=policy, max_draft_length=most, dtype=options.dtype)
    window = min(options.window, 256) if smoke else options.window
    rows, prompt = len(hyperparameters["threshold"]), encode(pair.target, options.prompt)
    if window > pair.target.model.spec.context or window < 2 * len(prompt):
        context = pair.target.model.spec.context
        raise ValueError(f"a window must hold twice the prompt's {len(prompt)} tokens and at most {context}: {window}")
    texts, carried, parts, emitted = [prompt] * rows, None, [], 0
    slots = slots_for(window, 0, max(pair.decoder.parts.widths))
    while emitted < tokens:
        new = min(window - len(texts[0]), tokens - emitted)
        state = pair.decoder.prefill(
            pair.params,
            texts,
            max_new_tokens=new,
            seed=(seed + len(parts) * rows + np.arange(rows)) % 2**32,
            warp=make_warp(rows, options.temperature),
            policy=pair.policy,
            policy_hyperparameters=dict(hyperparameters),
            stop_ids=(),
            slots=slots,
            record_rounds=window,
        )
        state = pair.decoder.run(pair.params, state if carried is None else state._replace(policy=carried))
        parts.append(_rounds(state, emitted))
        carried = jax.device_get(state.policy)  # the state itself is given away with the next call
        known = np.asarray(state.tokens)[:, : len(texts[0]) + new]
        texts = [line[-(window // 2) :].tolist() for line in known]
        emitted += new
    return join_rounds(parts, emitted)


def _rounds(state: DecodeState, before: int) -> LongRun:
    """The recorded rounds of a window."""
    record = state.record
    assert record is not None
    drafted, accepted, emitted, passes = (
        np.asarray(leaf, np.int64) for leaf in (record.drafted, record.accepted, record.emitted, record.drafter_passes)
    )
    index = np.arange(drafted.shape[1])[None, :]
    played = index < np.asarray(state.statistics.num_rounds)[:, None]
    at = np.cumsum(np.where(played, emitted, 0), axis=1) - np.where(played, emitted, 0)
    looked = np.arange(record.entropy.shape[2])[None, None, :] < passes[:, :, None]
    total = np.where(looked, np.asarray(record.entropy, np.float64), 0.0).sum(axis=2)
    entropy = np.where(passes > 0, total / np.maximum(passes, 1), np.nan)
    position = np.where(played, before + at, -1)
    return LongRun(position, drafted, accepted, passes, entropy, np.asarray(record.threshold), 0)
