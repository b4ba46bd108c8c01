"""A comb of fixed shape: a chain of drafts with siblings, the baseline of policies that choose both.

With expanded siblings it is a tree of fixed shape. Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.trees.seams import Extras, TreePolicy
from specdec_jax.contrib.trees.stopping._siblings import check_expanded
from specdec_jax.hyperparameters import per_row, vector_per_row
from specdec_jax.stopping._defaults import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, RoundContext


class CombState(NamedTuple):
    draft_length: Array  # [B] int32
    siblings: Array  # [B, N] int32, siblings of the first, second ... draft
    children: Array  # [B] int32, children of every expanded sibling


@strategy
def comb(most: int = 3, expanded: int = 0) -> TreePolicy:
    """Draft `links` tokens like `static`, with `siblings`.

    Args:
        most: maximum siblings of a draft (M), all of which are drawn.
        expanded: number of siblings that a drafter pass expands (W), those of the first drafts first; 0: none.

    Hyperparameters (`init`): links (int >= 0, default 3), siblings (of the first draft, the second ...: default 2, 1;
    none for later ones), children (of each expanded sibling, default 1). Tokens that do not fit the widest verification
    are dropped, from the last.

    Raises:
        ValueError: most below 1, or expanded below 0.
    """
    if most < 1:
        raise ValueError(f"comb needs most of 1 or more, got {most}: static drafts chains alone")
    check_expanded("comb", expanded, most)

    def init(batch: int, links: Any = 3, siblings: Sequence[int] | Any = (2, 1), children: int | Any = 1) -> CombState:
        length = per_row(batch, links, "links", low=0, dtype=np.int32)
        wanted = vector_per_row(batch, siblings, "siblings", _entries(siblings), low=0.0, high=float(most))
        follow = per_row(batch, children, "children", low=0, high=most, dtype=np.int32)
        return CombState(length, wanted.astype(jnp.int32), follow)

    def beside(state: CombState, length: Array, free: Array, context: RoundContext, parent: Array | None) -> Extras:
        del length, free, context
        children = None if parent is None else jnp.broadcast_to(state.children[:, None], parent.shape)
        return Extras(state.siblings, children)

    def expand(state: CombState, drafted: Array, context: RoundContext) -> Array:
        del drafted, context
        depth, index = state.siblings.shape[1], jnp.arange(most, dtype=jnp.int32)[None, None, :]
        order = jnp.arange(depth, dtype=jnp.int32)[None, :, None] + depth * index
        earlier = 1.0 / (1 + order).astype(jnp.float32)
        return jnp.where(index < state.siblings[:, :, None], earlier, 0.0)

    more: dict[str, Any] = {"expanded": expanded, "expand": expand} if expanded else {}
    return TreePolicy(
        init, begin_with_length, proceed=proceed_to_length, threshold=show_length, siblings=most, beside=beside, **more
    )


def _entries(values: Any) -> int:
    """Length of a vector, or of each row's; its entries may be traced."""
    if not isinstance(values, (list, tuple)) and np.ndim(values) < 1:
        raise ValueError(f"siblings must be a list of numbers, one a draft, got {values!r}")
    return len(values) if isinstance(values, (list, tuple)) else values.shape[-1]
