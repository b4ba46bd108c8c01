"""A comb of fixed shape: a chain of drafts with siblings, the baseline of policies that choose both.

Siblings: arXiv 2402.14160, 2402.12374 (`siblings.py`).
"""

from typing import Annotated, Any, NamedTuple

from specdec_jax.contrib.trees.seams import TreePolicy
from specdec_jax.ranges import Between, Count
from specdec_jax.stopping.static import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array


class CombState(NamedTuple):
    draft_length: Array  # [B] int32
    siblings: Array  # [B, N] int32, siblings of the first, second ... draft


@strategy
def comb(most: Annotated[int, Between(1)] = 3) -> TreePolicy:
    """Draft `links` tokens like `static`, with `siblings`.

    Args:
        most: maximum siblings of a draft (M), all of which are drawn.

    Hyperparameters (`init`): links (int >= 0, default 3), siblings (of the first draft, the second ...: default 2, 1;
    none for later ones). Tokens that do not fit the widest verification are dropped, from the last.
    """

    def init(
        batch: int, links: Count = 3, siblings: Annotated[Any, Between(0, most, whole=True, entries=0)] = (2, 1)
    ) -> CombState:
        return CombState(links, siblings)

    decisions = {"begin": begin_with_length, "proceed": proceed_to_length, "threshold": show_length}
    return TreePolicy(init, **decisions, siblings=most, beside=lambda state, *_: state.siblings)
