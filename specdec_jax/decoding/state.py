"""Builds the initial state of a request, with the source of an encoder, on the host; its arguments are checked."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specdec_jax.decoding.rounds import Parts
from specdec_jax.decoding.sampling import make_warp, prompt_hashes, seeds_of
from specdec_jax.decoding.statistics import no_counts, no_record
from specdec_jax.hyperparameters import host
from specdec_jax.sharding import on_host
from specdec_jax.strategy import nearest
from specdec_jax.types import Array, DecodeState, LanguageModel, ModelSpec, Monitor, StoppingPolicy, Verifier, Warp

UNREAD = ("target_cache", "drafter", "policy", "verifier", "monitor", "warp")
STOP_IDS = 8  # stop tokens are padded to a multiple of this, so that one more needs no compilation

Padded = tuple[Array, np.ndarray]  # tokens [B, E] int32, lengths [B] int32


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
    *,
    sources: Sequence[Sequence[int]] | None = None,
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
) -> DecodeState:
    """A state on the host, without caches, from the checked arguments of a request.

    Row b's seed is seed[b], or seed + b for a single number; keys of `jax.random` become numbers (`sampling.seeds_of`).
    Prompts (also arrays), seeds, warps and hyperparameters may be traced and are then not checked. `sources` are the
    inputs of an encoder, used here for the rows' keys only. `record_rounds` is the capacity of the record in rounds (a
    generation has at most max_new_tokens); 0: no record. `policy`, `verifier` and `monitor` are the decoder's with
    other hyperparameters; `policy_hyperparameters` etc. take precedence over those, and may be given per row, [B].

    Raises:
        ValueError: no or empty prompts, tokens outside the vocabulary, a max_new_tokens that is traced, negative or
            beyond the context, too few slots, a seed outside [0, 2**32), a temperature above 0 for a verifier of greedy
            decoding, unknown or invalid hyperparameters, or a strategy that the decoder was not compiled for.
    """
    batch, longest = len(prompts), parts.drafter.max_draft_length
    lengths, limits = _lengths(parts, prompts, max_new_tokens)
    widest = max(parts.widths)
    needed = int(limits.max()) + widest
    slots = slots_for(int(limits.max()), 0, widest) if slots is None else slots
    if slots < needed:
        raise ValueError(f"{slots} cache slots cannot hold {needed} = prompt + max_new_tokens + widest width {widest}")
    warp = make_warp(batch) if warp is None else warp
    traced = isinstance(warp.temperature, Tracer)
    if parts.verifier.greedy_only and not traced and np.any(np.asarray(warp.temperature) > 0):
        raise ValueError(f"greedy verification needs temperature 0, got {np.asarray(warp.temperature).max():g}")
    return DecodeState(
        tokens=laid(prompts, slots),
        length=host(lengths),
        prompt_length=host(lengths.copy()),
        limit=host(limits),
        done=host(limits <= lengths),
        key=_keys(prompts, sources, seed),
        stop_ids=_padded(parts.target.spec.eos_ids if stop_ids is None else stop_ids, batch),
        warp=warp,
        target_cache=(),
        drafter=(),
        policy=_initial_state(parts.policy, policy, batch, policy_hyperparameters),
        verifier=_initial_state(parts.verifier, verifier, batch, verifier_hyperparameters),
        monitor=_initial_state(parts.monitor, monitor, batch, monitor_hyperparameters),
        statistics=no_counts(batch, longest),
        record=no_record(batch, longest, record_rounds),
    )


def _initial_state(built: Any, requested: Any, batch: int, hyperparameters: Mapping[str, Any] | None) -> Any:
    """The initial state of the requested strategy, which must be the decoder's except for its hyperparameters."""
    if requested is not None and requested.bare != built.bare:
        raise ValueError(f"this decoder was built for {built!r}, not for {requested!r}")
    strategy, values = built if requested is None else requested, hyperparameters or {}
    for name in values.keys() - strategy.hyperparameters.keys():
        raise ValueError(f"{strategy.name} has no hyperparameter {name!r}{nearest(name, strategy.hyperparameters)}")
    return strategy.init(batch, **values)


def _lengths(
    parts: Parts, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt lengths and the lengths at which rows end, [B] int32 each. Raises ValueError for invalid ones."""
    spec = parts.target.spec
    if not len(prompts):
        raise ValueError("a prompt is empty: decoding needs at least one token to continue from")
    if isinstance(max_new_tokens, Tracer):
        raise ValueError("max_new_tokens decides the shape of the caches: it must be static, and is traced")
    check_tokens("prompt", prompts, spec.vocab_size)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    new = np.broadcast_to(np.asarray(max_new_tokens), lengths.shape)  # checked before the cast to int32
    if not all(isinstance(number, int) for number in new.tolist()):
        raise ValueError(f"max_new_tokens must be whole numbers, got {max_new_tokens!r}")
    if new.min() < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {new.min()}")
    if (lengths + new).max() > spec.context:
        row = int((lengths + new).argmax())
        raise ValueError(
            f"prompt {row} of {lengths[row]} tokens and {new[row]} new ones exceed the target's context, {spec.context}"
        )
    return lengths, (lengths + new).astype(np.int32)


def check_tokens(kind: str, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises ValueError for a text (named by `kind` and row) that is empty or has a token outside the vocabulary.

    Traced tokens are not checked.
    """
    for row, text in enumerate(texts):
        if not np.ndim(text):
            raise ValueError(f"{kind} {row} must be a sequence of tokens, got {text!r}")
        if not len(text):
            raise ValueError(f"a {kind} is empty: decoding needs at least one token to continue from")
        concrete = np.zeros(0, np.int32) if isinstance(text, Tracer) else np.asarray(text)
        wrong = concrete[~((concrete >= 0) & (concrete < vocab_size))]
        if len(wrong):
            raise ValueError(f"{kind} {row} has token {wrong[0]}, outside the vocabulary of {vocab_size}")


def laid(texts: Sequence[Sequence[int]], slots: int) -> Array:
    """The texts padded with zeros to [B, slots] int32; traced if any of them is."""
    if isinstance(texts, Tracer) or any(isinstance(text, Tracer) for text in texts):
        return jnp.stack([jnp.pad(jnp.asarray(text, jnp.int32), (0, slots - len(text))) for text in texts])
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return host(tokens)


def _keys(prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None, seed: Any) -> Array:
    """[B, 2] uint32: a hash of each row's inputs, and its seed. A row's random numbers depend on these alone."""
    hashes = prompt_hashes(*[prompts] if sources is None else [prompts, sources])
    batch, numbers = len(prompts), seeds_of(seed, len(prompts))
    if isinstance(numbers, Tracer):
        more = jnp.arange(batch) if numbers.shape == () else jnp.zeros(batch)
        seeds = numbers.astype(jnp.uint32) + more.astype(jnp.uint32)
    else:
        if numbers.dtype.kind not in "iu" or np.any(numbers < 0) or np.any(numbers >= 2**32):
            raise ValueError(f"seed must be an integer in [0, 2**32), got {seed!r}")
        if numbers.shape not in ((), (batch,)):
            raise ValueError(f"seed must be one number or {batch} (one a row), got shape {numbers.shape}")
        seeds = (int(numbers) + np.arange(batch)) % 2**32 if numbers.shape == () else numbers
        seeds = seeds.astype(np.uint32)
    if isinstance(hashes, Tracer) or isinstance(seeds, Tracer):
        return jnp.stack([hashes, seeds], axis=1)
    return host(np.stack([hashes, seeds], axis=1))


def _padded(stop_ids: Sequence[int], batch: int) -> Array:
    missing = -len(stop_ids) % STOP_IDS or (STOP_IDS if not stop_ids else 0)
    return host(np.tile(np.array([*stop_ids, *[-1] * missing], np.int32), (batch, 1)))


def fresh_request(
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    *,
    sources: Sequence[Sequence[int]] | None = None,
    source_slots: int | None = None,
    **options: Any,
) -> tuple[DecodeState, Padded | None]:
    """A state on the host (with the options of `fresh_state`), and the padded sources if the target has an encoder.

    Raises ValueError as `fresh_state` and `padded_sources` do.
    """
    padded = padded_sources(parts.target.spec, sources, len(prompts), source_slots)
    return fresh_state(parts, prompts, sources=sources, **options), padded


def source_slots_for(sources: Sequence[Sequence[int]]) -> int:
    """The smallest bucket that holds the longest source: 64, 96, 128 ... as for caches (`slots_for`)."""
    return slots_for(max(map(len, sources)), 0, 0)


def padded_sources(
    spec: ModelSpec, sources: Sequence[Sequence[int]] | None, rows: int, slots: int | None
) -> Padded | None:
    """The padded sources of `rows` rows; None for a model without an encoder.

    Args:
        slots: E; None: `source_slots_for`.

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
    check_tokens("source", sources, spec.vocab_size)
    longest = max(map(len, sources))
    if longest > spec.source.longest:
        row = [len(source) for source in sources].index(longest)
        raise ValueError(f"source {row} of {longest} tokens exceeds the target's most, {spec.source.longest}")
    slots = source_slots_for(sources) if slots is None else slots
    if slots < longest:
        raise ValueError(f"{slots} slots cannot hold a source of {longest} tokens")
    return laid(sources, slots), np.array([len(source) for source in sources], np.int32)


def refuse_encoder(model: LanguageModel, caller: str) -> None:
    """Raises ValueError for a model with an encoder, which `caller` does not support."""
    if model.spec.source is not None:
        raise ValueError(f"{caller} does not serve models with an encoder, such as T5")
