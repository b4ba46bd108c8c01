"""A comb of fixed shape: a chain of drafts with siblings, the baseline of policies that choose both.

With expanded siblings it is a tree of fixed shape. Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.contrib.trees.seams import Extras, TreePolicy
from specdec_jax.ranges import Between, Count
from specdec_jax.stopping._defaults import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, RoundContext


class CombState(NamedTuple):
    draft_length: Array  # [B] int32
    siblings: Array  # [B, N] int32, siblings of the first, second ... draft
    children: Array  # [B] int32, children of every expanded sibling


@strategy
def comb(most: Annotated[int, Between(1)] = 3, expanded: Annotated[int, Between(0)] = 0) -> TreePolicy:
    """Draft `links` tokens like `static`, with `siblings`.

    Args:
        most: maximum siblings of a draft (M), all of which are drawn.
        expanded: number of siblings that a drafter pass expands (W), those of the first drafts first; 0: none.

    Hyperparameters (`init`): links (int >= 0, default 3), siblings (of the first draft, the second ...: default 2, 1;
    none for later ones), children (of each expanded sibling, default 1). Tokens that do not fit the widest verification
    are dropped, from the last.
    """

    def init(
        batch: int,
        links: Count = 3,
        siblings: Annotated[Any, Between(0, most, whole=True, entries=0)] = (2, 1),
        children: Annotated[Any, Between(0, most, whole=True)] = 1,
    ) -> CombState:
        del batch
        return CombState(links, siblings, children)

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
