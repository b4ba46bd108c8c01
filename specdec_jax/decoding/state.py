"""Builds the initial state of a request, with the source of an encoder, on the host; its arguments are checked."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specdec_jax.decoding.rounds import Parts
from specdec_jax.decoding.sampling import make_warp, prompt_hashes, seeds_of
from specdec_jax.decoding.statistics import no_counts, no_record
from specdec_jax.hyperparameters import host, in_rows
from specdec_jax.ranges import Between, shortened
from specdec_jax.sharding import on_host
from specdec_jax.strategy import nearest
from specdec_jax.types import Array, DecodeState, LanguageModel, ModelSpec, Monitor, StoppingPolicy, Verifier, Warp

UNREAD = ("target_cache", "drafter", "policy", "verifier", "monitor", "warp")
STOP_IDS = 8  # stop tokens are padded to a multiple of this, so that one more needs no compilation

Padded = tuple[Array, Array]  # tokens [B, P] int32, lengths [B] int32


def slots_for(prompt: int, max_new_tokens: int, widest: int) -> int:
    """The smallest bucket of cache slots for a generation: 64, 96, 128, 192, 256, 384 ... to compile few shapes."""
    needed = prompt + max_new_tokens + widest
    bucket = 64
    while bucket < needed:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return bucket


def readable(state: DecodeState) -> DecodeState:
    """Tokens, lengths, counts and records of all rows on the host; other fields are ().

    `monitor` holds the log-probabilities gathered by `monitors.log_probs`, if that is the monitor.
    """
    unread = dict.fromkeys(UNREAD, ()) | {"monitor": getattr(state.monitor, "log_probs", ())}
    return on_host(state._replace(**unread))


def fresh_state(
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    n: int = 1,
    *,
    lengths: Any = None,
    sources: Sequence[Sequence[int]] | None = None,
    source_slots: int | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    seed: Any = 0,
    warp: Warp | None = None,
    policy: StoppingPolicy | None = None,
    verifier: Verifier | None = None,
    monitor: Monitor | None = None,
    policy_hyperparameters: Mapping[str, Any] | None = None,
    verifier_hyperparameters: Mapping[str, Any] | None = None,
    monitor_hyperparameters: Mapping[str, Any] | None = None,
    stop_ids: Sequence[int] | None = None,
    slots: int | None = None,
    record_rounds: int = 0,
) -> tuple[DecodeState, Padded | None]:
    """A state on the host, without caches, from the checked arguments of a request; and an encoder's padded sources.

    Prompts are sequences of tokens, or an array [B, P] that is padded at the end, with `lengths` [B]: then P, and not
    the lengths, decides the shapes. Prompt i has the rows i * n to i * n + n - 1. Row b's seed is seed[b], or seed + b
    for a single number; keys of `jax.random` become numbers (`sampling.seeds_of`). Prompts, lengths, seeds, warps and
    hyperparameters may be traced; their values are then not checked. `sources` are the inputs of an encoder, one a
    prompt, padded to `source_slots`. `record_rounds` is the capacity of the record in rounds (a generation has at most
    max_new_tokens); 0: no record. `policy`, `verifier` and `monitor` are the decoder's with other hyperparameters;
    `policy_hyperparameters` etc. take precedence over those, and may be given per row.

    Raises:
        ValueError: no or empty prompts, tokens that are no whole numbers or outside the vocabulary, lengths outside
            [1, P], a max_new_tokens that is traced, negative or beyond the context, too few slots, a seed outside
            [0, 2**32), seeds or warps of another number of rows, stop_ids that are no tokens, a temperature above 0
            for a verifier of greedy decoding, unknown or invalid hyperparameters, or a strategy that the decoder was
            not compiled for; and as `padded_sources`.
    """
    spec, by_shape = parts.target.spec, lengths is not None
    if isinstance(max_new_tokens, Tracer):
        raise ValueError("max_new_tokens decides the shape of the caches: it must be static, and is traced")
    Between(0, whole=True).check("record_rounds", record_rounds)
    source = padded_sources(spec, sources, len(prompts), source_slots)
    texts = padded_rows("prompt", prompts, spec.vocab_size, lengths)
    hashes = prompt_hashes(texts, *([] if source is None else [source]))
    tokens, lengths, hashes = (_namespace(leaf).repeat(leaf, n, axis=0) for leaf in (*texts, hashes))
    batch, longest = len(tokens), parts.drafter.max_draft_length
    new = np.asarray(in_rows(batch, max_new_tokens, "max_new_tokens", Between(0, whole=True)), np.int64)
    occupied = new + (tokens.shape[1] if by_shape else np.asarray(lengths))
    limits = occupied if isinstance(lengths, Tracer) else new + np.asarray(lengths)
    if limits.max() > spec.context:
        row = int(limits.argmax())
        words = f"prompt {row // n} of {limits[row] - new[row]} tokens and {new[row]} new ones"
        raise ValueError(f"{words} exceed the target's context, {spec.context}")
    widest = max(parts.widths)
    needed = int(occupied.max()) + widest
    slots = slots_for(int(occupied.max()), 0, widest) if slots is None else slots
    if slots < needed:
        raise ValueError(f"{slots} cache slots cannot hold {needed} = prompt + max_new_tokens + widest width {widest}")
    warp = make_warp(batch) if warp is None else warp
    if np.shape(warp.temperature) != (batch,):
        raise ValueError(f"the warp is of {np.size(warp.temperature)} rows, and there are {batch}: make_warp({batch})")
    if parts.verifier.greedy_only and not isinstance(warp.temperature, Tracer) and np.any(warp.temperature > 0):
        raise ValueError(f"greedy verification needs temperature 0, got {np.asarray(warp.temperature).max():g}")
    numbers = seeds_of(seed, batch)
    value = numbers if isinstance(numbers, Tracer) else numbers.tolist()
    seeds = in_rows(batch, value, "seed", Between(0, 2**32 - 1, whole=True), np.uint32)
    seeds = seeds + np.arange(batch, dtype=np.uint32) if numbers.shape == () else seeds
    stop_ids = spec.eos_ids if stop_ids is None else stop_ids
    try:
        ends = [operator.index(token) for token in stop_ids]
    except TypeError:  # a number, or rows of them
        ends = [-1]
    if not all(0 <= token < spec.vocab_size for token in ends):
        raise ValueError(f"stop_ids must be a tuple of tokens in [0, {spec.vocab_size}), got {shortened(stop_ids)}")
    ends += [-1] * (-len(ends) % STOP_IDS if ends else STOP_IDS)
    state = DecodeState(
        tokens=_namespace(tokens).pad(tokens, ((0, 0), (0, slots - tokens.shape[1]))),
        length=lengths,
        prompt_length=lengths.copy(),
        limit=lengths + new.astype(np.int32),
        done=host(new == 0),
        key=_namespace(hashes, seeds).stack([hashes, seeds], axis=1),
        stop_ids=host(np.tile(np.array(ends, np.int32), (batch, 1))),
        warp=warp,
        target_cache=(),
        drafter=(),
        policy=_initial_state(parts.policy, policy, batch, policy_hyperparameters),
        verifier=_initial_state(parts.verifier, verifier, batch, verifier_hyperparameters),
        monitor=_initial_state(parts.monitor, monitor, batch, monitor_hyperparameters),
        statistics=no_counts(batch, longest),
        record=no_record(batch, longest, record_rounds),
    )
    return state, source


def _initial_state(built: Any, requested: Any, batch: int, hyperparameters: Mapping[str, Any] | None) -> Any:
    """The initial state of the requested strategy, which must be the decoder's except for its hyperparameters."""
    if requested is not None and requested.bare != built.bare:
        raise ValueError(f"this decoder was built for {built!r}, not for {requested!r}")
    strategy, values = built if requested is None else requested, hyperparameters or {}
    for name in values.keys() - strategy.hyperparameters.keys():
        raise ValueError(f"{strategy.name} has no hyperparameter {name!r}{nearest(name, strategy.hyperparameters)}")
    return strategy.init(batch, **values)


def padded_rows(kind: str, texts: Sequence[Sequence[int]], vocab_size: int, lengths: Any = None) -> Padded:
    """The texts as tokens [B, P] int32, zero beyond their lengths, and the lengths [B] int32.

    Args:
        kind: the texts' name in messages.
        texts: B sequences of tokens, or an array [B, P]. Traced tokens are not checked.
        lengths: [B], of an array that is padded at the end; None: the texts are not padded.

    Raises:
        ValueError: a text that is empty or has an entry that is no token, lengths outside [1, P] or without an array.
    """
    batch, shape = len(texts), list[int](getattr(texts, "shape", ()))
    if not batch or 0 in shape:
        raise ValueError(f"a {kind} is empty: decoding needs at least one token to continue from")
    if lengths is not None:
        if len(shape) != 2:
            raise ValueError(f"lengths are those of padded {kind}s, one array [rows, slots], got {shortened(texts)}")
        lengths = in_rows(batch, lengths, "lengths", Between(1, shape[1], whole=True))
    if len(shape) == 2 and (isinstance(texts, Tracer) or isinstance(lengths, Tracer)):
        lengths = host(np.full(batch, shape[1], np.int32)) if lengths is None else lengths
        inside = np.arange(shape[1], dtype=np.int32)[None, :] < lengths[:, None]
        return jnp.where(inside, jnp.asarray(texts), 0).astype(jnp.int32), lengths
    rows: Any = texts if lengths is None else [row[:end] for row, end in zip(np.asarray(texts), lengths, strict=True)]
    for row, text in enumerate(rows):
        if not np.ndim(text):
            raise ValueError(f"{kind} {row} must be a sequence of tokens, got {text!r}")
        if not len(text):
            raise ValueError(f"a {kind} is empty: decoding needs at least one token to continue from")
        concrete = np.zeros(0, np.int32) if isinstance(text, Tracer) else np.asarray(text)
        if concrete.dtype.kind not in "iu" or concrete.ndim > 1:
            raise ValueError(f"{kind} {row} must be a sequence of whole numbers, got {shortened(text)}")
        wrong = concrete[(concrete < 0) | (concrete >= vocab_size)]
        if len(wrong):
            raise ValueError(f"{kind} {row} has token {wrong[0]}, outside the vocabulary of {vocab_size}")
    sizes = np.array([len(text) for text in rows], np.int32)
    return laid(rows, int(sizes.max()) if lengths is None else shape[1]), host(sizes)


def laid(texts: Sequence[Sequence[int]], slots: int) -> Array:
    """The texts padded with zeros to [B, slots] int32; traced if any of them is."""
    if any(isinstance(text, Tracer) for text in texts):
        return jnp.stack([jnp.pad(jnp.asarray(text, jnp.int32), (0, slots - len(text))) for text in texts])
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return host(tokens)


def _namespace(*arrays: Any) -> Any:
    """The module of these arrays' functions: jax.numpy if one is traced, else numpy."""
    return jnp if any(isinstance(array, Tracer) for array in arrays) else np


def padded_sources(
    spec: ModelSpec, sources: Sequence[Sequence[int]] | None, rows: int, slots: int | None
) -> Padded | None:
    """The padded sources of `rows` rows; None for a model without an encoder.

    Args:
        slots: E; None: the smallest bucket that holds the longest source, as for caches.

    Raises:
        ValueError: sources missing for a model with an encoder or given for one without, not one per row, empty, too
            long or with a token outside the vocabulary, or more tokens than slots.
    """
    if spec.source is None:
        if sources is not None:
            raise ValueError(f"the target has no encoder, and {len(sources)} sources are given: they belong in prompts")
        return None
    if sources is None:
        raise ValueError("the target has an encoder: give a source for each prompt")
    if len(sources) != rows:
        raise ValueError(f"{rows} prompts need as many sources, got {len(sources)}")
    tokens, lengths = padded_rows("source", sources, spec.vocab_size)
    longest = tokens.shape[1]
    if longest > spec.source.longest:
        row = np.asarray(lengths).argmax()
        raise ValueError(f"source {row} of {longest} tokens exceeds the target's most, {spec.source.longest}")
    slots = slots_for(longest, 0, 0) if slots is None else slots
    if slots < longest:
        raise ValueError(f"{slots} slots cannot hold a source of {longest} tokens")
    return _namespace(tokens).pad(tokens, ((0, 0), (0, slots - longest))), lengths


def refuse_encoder(model: LanguageModel, caller: str) -> None:
    """Raises ValueError for a model with an encoder, which `caller` does not support."""
    if model.spec.source is not None:
        raise ValueError(f"{caller} does not serve models with an encoder, such as T5")
