"""What drafts with siblings add to the seams: rules that want them, verifiers that decide about them, and their values.

A draft is a chain with siblings: further tokens of a draft's distribution, verified beside it. Siblings may be
expanded, so that they have children of their own. docs/combs.md describes both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specdec_jax.types import (
    Array,
    Distribution,
    PolicyState,
    RoundContext,
    StoppingPolicy,
    Verifier,
)


class Children(NamedTuple):
    """What may follow siblings that were expanded, fed to the drafter beside the chain; E of them a round."""

    parent: Array  # [B, E] int32, the depth of the sibling times M, and its index; -1: none
    tokens: Array  # [B, E, M] int32, drawn without replacement from the distribution after it
    log_q: Array | None  # [B, E, V] float32, that distribution; None as of drafts
    count: Array  # [B, E] int32, 0..M, how many are verified


class TreeDraft(NamedTuple):
    """`Draft`, and what is verified beside it."""

    tokens: Array  # [B, K] int32
    log_q: Array | None  # [B, K, V] float32
    one_hot: Array  # [B, K] bool
    length: Array  # [B] int32, 0..K
    siblings: Array | None = None
    # [B, K, M] int32, drawn without replacement from the same distributions; None: a width without room for drafts
    sibling_counts: Array | None = None  # [B, K] int32, 0..M, siblings verified after each draft
    children: Children | None = None  # of rules that expand siblings


class TreeResult(NamedTuple):
    """`VerificationResult`, and what was accepted after the accepted drafts."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted drafts of the chain = length - 1
    extra_tokens: Array  # [B] int32, tokens accepted after these drafts and emitted besides: a sibling, and its child

    @property
    def emitted(self) -> Array:
        """Tokens [B] int32 of `tokens`, before the end-of-sequence cut."""
        return self.length + self.extra_tokens


class SiblingOutcomes(NamedTuple):
    """What may follow the accepted tokens: one of M siblings, or a token of `rest`."""

    chance: Array  # [B, M+1], of none of them, the first, the second ...
    tokens: Array  # [B, M] int32
    rest: Array  # [B, V], the next token's distribution where none is accepted


class Extras(NamedTuple):
    """How many tokens a policy wants verified beside a draft."""

    siblings: Array  # [B, N] int32, of the first N drafts, up to `siblings`
    children: Array | None = None  # [B, E] int32, of the siblings that were expanded


class Beside(Protocol):
    """What to verify beside the draft, which is complete.

    `length` [B] int32 are its tokens, `free` [B] int32 how many siblings fit, `parent` as `Children` has it,
    None of rules that expand nothing. Decided before it is known which tokens they are.
    """

    def __call__(
        self, state: PolicyState, length: Array, free: Array, context: RoundContext, parent: Array | None, /
    ) -> Extras: ...


class Expand(Protocol):
    """What it is worth to feed the next drafter pass with a sibling of the first N drafts, [B, N, M] float32.

    Called before every pass; `drafted` [B] int32 counts the drafts of the round so far. The best `expanded` ones above
    0 are fed that were not before. Policies never see the distributions after expanded siblings, so verification cannot
    depend on them.
    """

    def __call__(self, state: PolicyState, drafted: Array, context: RoundContext, /) -> Array: ...


class DecideSiblings(Protocol):
    """What may follow `accepted` [B] int32 drafts of a draft with siblings; as of `verify`, which has counted them."""

    def __call__(
        self, draft: TreeDraft, distributions: Distribution, accepted: Array, context: RoundContext, /
    ) -> SiblingOutcomes: ...


class _Hooks:
    """The module `hooks`, imported when it is first used: it imports this one."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        from specdec_jax.contrib.trees import hooks

        return hooks


@dataclass(frozen=True, eq=False, repr=False)
class TreePolicy(StoppingPolicy):
    """A stopping rule that wants siblings verified beside its drafts. `update` gets a TreeDraft and a TreeResult."""

    siblings: int = 0  # M, most siblings of a draft
    beside: Beside | None = None
    expanded: int = 0  # W, siblings that a drafter pass is fed with, so that their children are drawn too
    expand: Expand | None = None  # of rules that expand some

    rounds = _Hooks()
    forwarded = ("beside", "expand")


@dataclass(frozen=True, eq=False, repr=False)
class TreeVerifier(Verifier):
    """A verifier that decides about siblings itself; others have them tried on their next distribution."""

    outcomes: Callable[..., SiblingOutcomes] | None = None  # as `DecideSiblings`

    rounds = _Hooks()
