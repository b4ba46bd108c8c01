"""Language models that draft by other means than `apply`: with a reduced head, or from the target's hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec_jax.types.seams import Drafter, Forward, LanguageModel
from specdec_jax.types.values import Array, Cache, Params


class ReducedHead(NamedTuple):
    """A pass that computes the logits of N candidate tokens only; other tokens are never proposed.

    The candidates may depend on a row's text, which `note` reads. `token` and `spread` take the cache after the pass.
    """

    note: Callable[[Params, Array, Cache], Cache]  # (params, tokens [B, T] of the next pass, cache)
    apply: Forward  # a pass over tokens given to `note` before; logits [B, T, N]
    token: Callable[[Params, Cache, Array], Array]  # index of a candidate [B] int32 -> token [B] int32
    spread: Callable[[Params, Cache, Array], Array]  # values [B, ..., N] -> [B, ..., V], -inf elsewhere


class Reading(NamedTuple):
    """How a drafter reads the hidden states of its target. P is the width of the features kept per position."""

    layers: tuple[int, ...]  # the N layers of the target that are read, numbered as in `StreamsForward`
    target_width: int  # D of the target
    width: int  # P
    dtype: Any  # dtype of the stored features
    read: Callable[[Params, Array], Array]  # hidden states [B, T, N, D] of the target -> [B, T, P]
    stand_in: Callable[[Params, Array], Array]  # as `read` for drafts: own last hidden states [B, T, D] -> [B, T, P]
    apply: Callable[..., tuple[Array, Array, Cache]]
    # (params, tokens [B, T], features of the position before each token [B, T, P], cache, positions, mask) -> (logits
    # [B, T, V], or [B, T, N] with a reduced head, after its `note`; last hidden states [B, T, D]; cache)


@dataclass(frozen=True)
class DraftModel(LanguageModel):
    """A language model with its method of drafting; without these fields it drafts by `apply`."""

    head: ReducedHead | None = None
    reading: Reading | None = None
    draft_with: Callable[["DraftModel", int], Drafter] | None = None
    # (model, maximum draft length) -> drafter; None: that of drafters/reading.py or drafters/model.py

    @classmethod
    def of(cls, model: LanguageModel) -> "DraftModel":
        """The model itself if it is a DraftModel, else a DraftModel that drafts by `apply`."""
        return model if isinstance(model, cls) else cls(**vars(model))
