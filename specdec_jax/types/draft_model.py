"""Language models that draft in other ways than by `apply`: with a reduced head, or reading their target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec_jax.types.seams import Drafter, Forward, LanguageModel
from specdec_jax.types.values import Array, Cache, Params


class ReducedHead(NamedTuple):
    """A pass that gives the logits of N tokens only; the others are never proposed.

    Which they are may depend on a row's text: `note` takes it. `token` and `spread` take the cache that the pass left.
    """

    note: Callable[[Params, Array, Cache], Cache]  # tokens [B, T] that the next pass feeds, and its cache
    apply: Forward  # a pass of tokens that are noted; gives logits [B, T, N]
    token: Callable[[Params, Cache, Array], Array]  # which of the N [B] int32 -> token [B] int32
    spread: Callable[[Params, Cache, Array], Array]  # values [B, ..., N] -> [B, ..., V], -inf for tokens not among them


class Reading(NamedTuple):
    """How a model reads the hidden states of its target. P is the width of what is kept of them."""

    layers: tuple[int, ...]  # of the target, N of them, as `StreamsForward` counts
    target_width: int  # D of the target
    width: int  # P
    dtype: Any  # that what is kept has
    read: Callable[[Params, Array], Array]  # hidden states [B, T, N, D] of the target -> [B, T, P]
    stand_in: Callable[[Params, Array], Array]  # the model's last hidden states [B, T, D], in their place -> [B, T, P]
    apply: Callable[..., tuple[Array, Array, Cache]]
    # (params, tokens [B, T], what was read at the position before each [B, T, P], cache, positions, mask) -> (logits
    # [B, T, V], of a reduced head, which has noted them, [B, T, N], last hidden states [B, T, D], cache)


@dataclass(frozen=True)
class DraftModel(LanguageModel):
    """A language model, and how it drafts; without these fields it drafts by `apply`, as any language model can."""

    head: ReducedHead | None = None
    reading: Reading | None = None
    draft_with: Callable[["DraftModel", int], Drafter] | None = None
    # (the model, most drafts a round) -> what drafts with it; None: drafters/reading.py or drafters/model.py

    @classmethod
    def of(cls, model: LanguageModel) -> "DraftModel":
        """The model itself if it is one, or a language model that drafts by `apply`."""
        return model if isinstance(model, cls) else cls(**vars(model))
