"""Interfaces for drafts with siblings: policies, verifiers, and their values.

A draft is a chain with siblings: further tokens from a draft's distribution, verified in the same pass (docs/combs.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult, Verifier


class TreeDraft(NamedTuple):
    """`Draft` with siblings."""

    tokens: Array  # [B, K] int32
    log_q: Array | None  # [B, K, V] float32
    one_hot: Array  # [B, K] bool
    length: Array  # [B] int32, 0..K
    siblings: Array  # [B, K, M] int32, drawn without replacement from the same distributions
    sibling_counts: Array  # [B, K] int32, 0..M, number of verified siblings of each draft

    @classmethod
    def of(cls, draft: Draft, siblings: Array, wanted: Array, free: Array) -> "TreeDraft":
        """A draft with the wanted numbers [B, N] of siblings of its first N tokens, at most `free` [B] in total.

        Chosen tokens have no siblings.
        """
        depth = jnp.arange(draft.one_hot.shape[1], dtype=jnp.int32)[None, :]
        count = jnp.pad(wanted, ((0, 0), (0, max(depth.shape[1] - wanted.shape[1], 0))))[:, : depth.shape[1]]
        drawn = (depth < draft.length[:, None]) & ~draft.one_hot
        count = jnp.where(drawn, jnp.clip(count, 0, siblings.shape[2]), 0)
        count = jnp.clip(free[:, None] - (jnp.cumsum(count, axis=1) - count), 0, count)
        return cls(*draft, siblings, count)

    @property
    def places(self) -> Array:
        """[B] int32, number of places in a target pass, without the token before the draft."""
        return self.length + jnp.sum(self.sibling_counts, axis=1, dtype=jnp.int32)


class TreeResult(NamedTuple):
    """`VerificationResult` with the accepted sibling."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted drafts of the chain = length - 1
    extra_tokens: Array  # [B] int32, 0 or 1: an accepted sibling is emitted too

    @property
    def emitted(self) -> Array:
        """Number [B] int32 of valid `tokens`, before the end-of-sequence cut."""
        return self.length + self.extra_tokens


class SiblingOutcomes(NamedTuple):
    """Outcomes after the accepted tokens: one of M siblings, or a token from `rest`."""

    chance: Array  # [B, M+1], probability of accepting none of them, the first, the second ...
    tokens: Array  # [B, M] int32
    rest: Array  # [B, V], the next token's distribution if none is accepted


Beside = Callable[[Any, Array, Array, RoundContext], Array]
"""How many siblings of each of the first N drafts to verify: (state, length, free, context) -> [B, N] int32.

Called with a complete draft of `length` [B] int32, when `free` [B] int32 further tokens fit; not with its tokens, on
which the number must not depend. At most `TreePolicy.siblings` count.
"""


DecideSiblings = Callable[[TreeDraft, Distribution, Array, RoundContext], SiblingOutcomes]
"""(draft, distributions, accepted, context) -> the outcomes after `accepted` [B] int32 drafts.

The number was drawn according to `verify`; `distributions` are the target's, with a K+1 axis after B.
"""


@dataclass(frozen=True, eq=False, repr=False)
class TreePolicy(StoppingPolicy):
    """A stopping policy for drafts with siblings. `update` gets a TreeDraft and a TreeResult."""

    siblings: int = 0  # M, maximum siblings of a draft
    beside: Beside | None = None

    def max_tokens(self, max_draft_length: int) -> int:
        """Maximum tokens of a draft, including all siblings."""
        return max_draft_length * (1 + self.siblings)

    def as_chain(self) -> StoppingPolicy:
        """The same policy without siblings; its `update` gets drafts and results as trees without siblings."""

        def update(state: Any, draft: Draft, result: VerificationResult) -> Any:
            none = jnp.zeros_like(draft.tokens)
            tree = TreeDraft(*draft, siblings=jnp.zeros((*none.shape, self.siblings), jnp.int32), sibling_counts=none)
            learnt_from: Any = tree, TreeResult(*result, extra_tokens=jnp.zeros_like(result.length))
            return self.update(state, *learnt_from)

        decisions = self.begin, self.check, self.proceed
        return StoppingPolicy(self.init, *decisions, update, self.threshold, self.reads, self.hyperparameters)


@dataclass(frozen=True, eq=False, repr=False)
class TreeVerifier(Verifier):
    """A verifier with its own rule for siblings; for others they are tested with the next distribution."""

    outcomes: DecideSiblings | None = None
