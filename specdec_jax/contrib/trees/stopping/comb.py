"""A comb of fixed shape: a chain of drafts with siblings, the baseline of policies that choose both.

Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.trees.seams import TreePolicy
from specdec_jax.hyperparameters import per_row, vector_per_row
from specdec_jax.stopping._defaults import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array


class CombState(NamedTuple):
    draft_length: Array  # [B] int32
    siblings: Array  # [B, N] int32, siblings of the first, second ... draft


@strategy
def comb(most: int = 3) -> TreePolicy:
    """Draft `links` tokens like `static`, with `siblings`.

    Args:
        most: maximum siblings of a draft (M), all of which are drawn.

    Hyperparameters (`init`): links (int >= 0, default 3), siblings (of the first draft, the second ...: default 2, 1;
    none for later ones). Tokens that do not fit the widest verification are dropped, from the last.

    Raises:
        ValueError: most below 1.
    """
    if most < 1:
        raise ValueError(f"comb needs most of 1 or more, got {most}: static drafts chains alone")

    def init(batch: int, links: Any = 3, siblings: Sequence[int] | Any = (2, 1)) -> CombState:
        if not isinstance(siblings, (list, tuple)) and np.ndim(siblings) < 1:
            raise ValueError(f"siblings must be a list of numbers, one a draft, got {siblings!r}")
        # the length of a vector, or of each row's; its entries may be traced
        entries = len(siblings) if isinstance(siblings, (list, tuple)) else np.shape(siblings)[-1]
        wanted = vector_per_row(batch, siblings, "siblings", entries, low=0.0, high=float(most))
        return CombState(per_row(batch, links, "links", low=0, dtype=np.int32), wanted.astype(jnp.int32))

    decisions = {"begin": begin_with_length, "proceed": proceed_to_length, "threshold": show_length}
    return TreePolicy(init, **decisions, siblings=most, beside=lambda state, *_: state.siblings)
