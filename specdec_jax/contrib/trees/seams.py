"""Interfaces for drafts with siblings: policies, verifiers, and their values.

A draft is a chain with siblings: further tokens from a draft's distribution, verified in the same pass. Siblings may be
expanded, which gives them children. docs/combs.md describes both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec_jax.types import Array, Distribution, PolicyState, RoundContext, StoppingPolicy, Verifier


class Children(NamedTuple):
    """Candidate tokens after expanded siblings, which were fed to the drafter with the chain; E per round."""

    parent: Array  # [B, E] int32, depth of the sibling * M + its index; -1: none
    tokens: Array  # [B, E, M] int32, drawn without replacement from the distribution after it
    log_q: Array | None  # [B, E, V] float32, that distribution; None as in Draft
    count: Array  # [B, E] int32, 0..M, number of verified children


class TreeDraft(NamedTuple):
    """`Draft` with siblings and children."""

    tokens: Array  # [B, K] int32
    log_q: Array | None  # [B, K, V] float32
    one_hot: Array  # [B, K] bool
    length: Array  # [B] int32, 0..K
    siblings: Array | None = None
    # [B, K, M] int32, drawn without replacement from the same distributions; None: a width without room for drafts
    sibling_counts: Array | None = None  # [B, K] int32, 0..M, number of verified siblings of each draft
    children: Children | None = None  # for policies that expand siblings


class TreeResult(NamedTuple):
    """`VerificationResult` with the accepted siblings and children."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted drafts of the chain = length - 1
    extra_tokens: Array  # [B] int32, number of further emitted tokens: an accepted sibling, and its child

    @property
    def emitted(self) -> Array:
        """Number [B] int32 of valid `tokens`, before the end-of-sequence cut."""
        return self.length + self.extra_tokens


class SiblingOutcomes(NamedTuple):
    """Outcomes after the accepted tokens: one of M siblings, or a token from `rest`."""

    chance: Array  # [B, M+1], probability of accepting none of them, the first, the second ...
    tokens: Array  # [B, M] int32
    rest: Array  # [B, V], the next token's distribution if none is accepted


class Extras(NamedTuple):
    """The numbers of siblings and children that a policy wants to verify."""

    siblings: Array  # [B, N] int32, for each of the first N drafts, up to `TreePolicy.siblings`
    children: Array | None = None  # [B, E] int32, for each expanded sibling


Beside = Callable[[PolicyState, Array, Array, RoundContext, Array | None], Extras]
"""Decides the siblings and children to verify with a complete draft: (state, length, free, context, parent) -> extras.

`length` [B] int32 is its length, `free` [B] int32 the number of further tokens that fit, `parent` as in `Children`,
None for policies without expansion. The decision does not depend on the tokens.
"""


Expand = Callable[[PolicyState, Array, RoundContext], Array]
"""The value of expanding each sibling of the first N drafts in the next drafter pass, [B, N, M] float32.

(state, drafted, context), called before every pass; `drafted` [B] int32 is the number of drafts of the round so far.
The best `expanded` ones above 0 that were not expanded before are fed. Policies never see the distributions after
expanded siblings, so verification cannot depend on them.
"""


DecideSiblings = Callable[[TreeDraft, Distribution, Array, RoundContext], SiblingOutcomes]
"""(draft, distributions, accepted, context) -> the outcomes after `accepted` [B] int32 drafts, drawn by `verify`."""


class _Hooks:
    """The module `hooks`, imported on first use because it imports this one."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        from specdec_jax.contrib.trees import hooks

        return hooks


@dataclass(frozen=True, eq=False, repr=False)
class TreePolicy(StoppingPolicy):
    """A stopping policy for drafts with siblings. `update` gets a TreeDraft and a TreeResult."""

    siblings: int = 0  # M, maximum siblings of a draft
    beside: Beside | None = None
    expanded: int = 0  # W, number of siblings that a drafter pass expands, so that they have children
    expand: Expand | None = None  # for policies with expansion

    rounds = _Hooks()


@dataclass(frozen=True, eq=False, repr=False)
class TreeVerifier(Verifier):
    """A verifier with its own rule for siblings; for others they are tested with the next distribution."""

    outcomes: DecideSiblings | None = None

    rounds = _Hooks()
