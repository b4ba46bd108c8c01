"""The sources of encoder-decoder targets, checked and padded on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.rounds import Parts
from specdec_jax.decoding.state import check_tokens, fresh_state, laid, slots_for
from specdec_jax.types import Array, DecodeState, LanguageModel, ModelSpec

Padded = tuple[Array, np.ndarray]  # tokens [B, E] int32, lengths [B] int32


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
    """The smallest bucket that holds the longest source: 64, 96, 128 ... as for caches (`state.slots_for`)."""
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
