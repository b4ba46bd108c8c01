"""Language models for drafting only (`types.DraftModel`), by other means than `apply`.

With a draft vocabulary, with a vocabulary other than the target's, or reading the target's hidden states.
"""

import functools
from typing import Any

from specdec_jax.models import adapters
from specdec_jax.types import DraftModel, LanguageModel


@functools.lru_cache(maxsize=16)
def with_vocabulary(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """`models.adapters.with_vocabulary` for draft models; tokens proposed by the head must be in both vocabularies."""
    plain = adapters.with_vocabulary(model, vocab_size)
    if plain is model or not isinstance(model, DraftModel):
        return plain
    head: Any = model.head
    reading: Any = model.reading

    def spread(params, cache, values):
        return adapters.resized(head.spread(params, cache, values), vocab_size)

    def reading_pass(params, tokens, reads, cache, positions=None, mask=None):
        logits, hidden, cache = reading.apply(params, tokens, reads, cache, positions, mask)
        return adapters.resized(logits, vocab_size), hidden, cache

    few = None if head is None else head._replace(spread=spread)
    reads = reading if reading is None or head is not None else reading._replace(apply=reading_pass)
    return DraftModel(**vars(plain), head=few, reading=reads, draft_with=model.draft_with)
