"""A comb of fixed shape: a chain of drafts with siblings beside each, the baseline of rules that choose both."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import per_row, vector_per_row
from specdec_jax.stopping._defaults import always_draw, begin_with_length, no_update, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, RoundContext, StoppingPolicy


class CombState(NamedTuple):
    draft_length: Array  # [B] int32
    siblings: Array  # [B, N] int32, beside the first, second ... draft


@strategy
def comb(most: int = 3) -> StoppingPolicy:
    """Draft `links` tokens as `static` does, with `siblings` beside them.

    Args:
        most: siblings that a draft may have (M); so many are drawn of each.

    Hyperparameters (`init`): links (int >= 0, default 3), siblings (of the first draft, the second ...: default 2, 1;
    none beside later ones). What the widest verification does not hold is left out, from the last on.

    Raises:
        ValueError: most below 1.
    """
    if most < 1:
        raise ValueError(f"comb needs most of 1 or more, got {most}: static drafts chains alone")

    def init(batch: int, links: Any = 3, siblings: Sequence[int] | Any = (2, 1)) -> CombState:
        length = per_row(batch, links, "links", low=0, dtype=np.int32)
        wanted = vector_per_row(batch, siblings, "siblings", _entries(siblings), low=0.0, high=float(most))
        return CombState(length, wanted.astype(jnp.int32))

    def beside(state: CombState, length: Array, room: Array, context: RoundContext) -> Array:
        del length, room, context
        return state.siblings

    return StoppingPolicy(
        init, begin_with_length, always_draw, proceed_to_length, no_update, show_length, siblings=most, beside=beside
    )


def _entries(values: Any) -> int:
    """Of a vector, or of one for each row; its entries may be traced."""
    if not isinstance(values, (list, tuple)) and np.ndim(values) < 1:
        raise ValueError(f"siblings must be a list of numbers, one a draft, got {values!r}")
    return len(values) if isinstance(values, (list, tuple)) else values.shape[-1]
