"""The interfaces: language models, stopping policies, verifiers, drafters and monitors, and their functions.

Every interface is a record of pure functions; the alias above it documents each function's arguments and
results. Policies, verifiers, drafters and monitors are strategies: values that record their factory and options
(specdec_jax/strategy.py). Arguments are positional, so an implementation may name them freely.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, NamedTuple, Self

import jax
import jax.numpy as jnp

from specdec_jax.strategy import Strategy
from specdec_jax.types.values import (
    Array,
    Cache,
    Distribution,
    Draft,
    DrafterState,
    LoopResult,
    ModelSpec,
    MonitorState,
    Params,
    PolicyState,
    RoundContext,
    VerificationResult,
    VerifierState,
)

Init = Callable[Concatenate[int, ...], Any]
"""(batch, **hyperparameters) -> the state of a policy, verifier or monitor before round one, every leaf [B, ...].

Arguments after `batch` are hyperparameters: keyword arguments with defaults, all of them traced.
"""


InitCache = Callable[..., Cache]
"""(params, batch, slots, source=None) -> an empty cache of `slots` (S) slots for `batch` rows.

`source`, an encoder's input, is encoded only here: (tokens [B, E] int32, lengths [B] int32); None without one.
"""


Forward = Callable[..., tuple[Array, Cache]]
"""One pass: (params, tokens [B, T] int32, cache, positions=None, mask=None) -> (output [B, T, ...] float32, cache).

Row b's tokens occupy slots cache.length[b] ... cache.length[b] + T - 1, and its length grows by T.
"""


StreamsForward = Callable[..., tuple[Array, Array, Cache]]
"""A pass that also returns hidden states: (params, tokens [B, T], cache, layers, positions=None, mask=None) ->
(logits [B, T, V], hidden [B, T, N, D] float32, cache).

`layers` (N of them, static): i is the residual stream after the i-th layer, 0 the embedding.
"""


class Hidden(NamedTuple):
    """Access to the hidden states of a model family; fields that it does not support are None.

    `last` omits the output projection: the logits are its result times the `kernel`.
    """

    last: Forward | None = None  # returns hidden states [B, T, D]
    kernel: Callable[[Params], Any] | None = None  # [V, D], the matrix for `models.layers.project`
    cap: float | None = None  # soft cap of the logits, cap * tanh(product / cap); None: no cap
    dtype: Any = None  # dtype of the output projection; None: the kernel's
    streams: StreamsForward | None = None
    num_layers: int = 0  # L: `streams` accepts layers 0 to L
    width: int = 0  # D of `streams`
    prepared: Callable[[Params], Params] = lambda params: params  # weights as passes read them, once per dispatch


@dataclass(frozen=True)
class LanguageModel:
    """Two pure functions and a rollback. Parameters are arguments: one compiled program serves any weights."""

    init_cache: InitCache
    apply: Forward  # returns logits [B, T, V]
    with_length: Callable[[Cache, Array], Cache]  # the cache with lengths [B] int32; smaller ones roll back
    spec: ModelSpec
    hidden: Hidden = Hidden()

    def replace(self, **fields: Any) -> Self:
        """A copy of the model with these fields replaced."""
        return replace(self, **fields)


Begin = Callable[[PolicyState, RoundContext], tuple[Array, PolicyState]]
"""Decides, before a round's first drafter pass, whether to run it: (state, context) -> (go_on [B] bool, state)."""


Check = Callable[[PolicyState, Distribution, Array, RoundContext], tuple[Array, PolicyState]]
"""Decides, from the next position's distribution only, whether to draft its token.

(state, distribution, drafted, context) -> (draft [B] bool, state). `drafted` [B] int32 is the number of tokens drafted
so far in this round.
"""


Proceed = Callable[[PolicyState, Distribution, Array, Array, RoundContext], tuple[Array, PolicyState]]
"""Decides, after `token` [B] int32 was drafted, whether to run another pass.

(state, distribution, token, drafted, context) -> (go_on [B] bool, state). `drafted` [B] int32 includes this token.
"""


Update = Callable[[PolicyState, Draft, VerificationResult], PolicyState]
"""The policy's state after a verification: (state, draft, result) -> state.

Called once a round, with the result before the end-of-sequence cut.
"""


def always(state: PolicyState, *arguments: Any) -> tuple[Array, PolicyState]:
    """Begin, draft or proceed in every row; the last argument is the context."""
    return jnp.ones_like(arguments[-1].alive), state


def no_update(state: PolicyState, draft: Draft, result: VerificationResult) -> PolicyState:
    """Return the state unchanged."""
    return state


def no_threshold(state: Any) -> Array:
    """[B] float32 NaN, which plots omit. A state without leaves gives one NaN for all rows."""
    leaves = jax.tree.leaves(state)
    return jnp.full(leaves[0].shape[:1] if leaves else (), jnp.nan, jnp.float32)


@dataclass(frozen=True, eq=False, repr=False)
class StoppingPolicy(Strategy):
    """When to stop drafting. A token is drafted or not before its value is known (docs/design.md, invariant 2).

    All functions but `init` have defaults: every round begins, drafts to its budget and leaves the state unchanged.
    """

    init: Init
    begin: Begin = always
    check: Check = always
    proceed: Proceed = always
    update: Update = no_update
    threshold: Callable[[PolicyState], Array] = no_threshold  # [B] float32, for charts (NaN: nothing)
    reads: frozenset[str] = frozenset()
    # "phases": the decoder needs a monitor of phases; "rows": a row's drafts depend on other rows of the batch
    hyperparameters: Any = None  # a Mapping: arguments of `init` with their defaults; None: from its signature

    @property
    def needs_phases(self) -> bool:
        """Whether the policy reads the phases of a monitor."""
        return "phases" in self.reads

    @property
    def joins_rows(self) -> bool:
        """Whether a row's drafts depend on the other rows of its batch."""
        return "rows" in self.reads

    @property
    def drafts_chains(self) -> bool:
        """Whether every draft is a chain, and `as_chain` the policy itself."""
        return self.tree_hooks is None

    def max_tokens(self, max_draft_length: int) -> int:
        """Maximum number of draft tokens in a verification pass with this policy: K unless drafts are not chains."""
        return max_draft_length

    def as_chain(self) -> "StoppingPolicy":
        """The same policy for rounds whose drafts are chains."""
        return self


NextDistribution = Callable[[Array], Array]
"""(accepted [B] int32) -> weights [B, V], not necessarily normalised, of the token after that many drafts."""


Verify = Callable[[VerifierState, Draft, Distribution, RoundContext], tuple[Array, NextDistribution, VerifierState]]
"""(state, draft, distributions, context) -> (log_prob_accepted [B, K+1], next_distribution, state).

`distributions` are the target's, with a K+1 axis after B; log_prob_accepted[b, k] = log P(k accepted | draft).
"""


@dataclass(frozen=True, eq=False, repr=False)
class Verifier(Strategy):
    """How many drafts are accepted, and the distribution of the token after them."""

    init: Init
    verify: Verify
    lossless: bool  # True: the output distribution is the target's, and a test proves it
    needs_log_q: bool = True
    greedy_only: bool = False  # True: temperatures above 0 are refused
    needs_phases: bool = False  # True: a decoder with this verifier needs a monitor of phases
    hyperparameters: Any = None


class Observer(NamedTuple):
    """What a drafter observes of the target's passes; the result is passed to the drafter's `commit` and `prefill`."""

    features: Callable[[Params, Array], Any]
    # (params, hidden states of `layers` [B, T, N, D] float32) -> leaves [B, T, ...]
    layers: tuple[int, ...]  # the N layers whose hidden states are read, numbered as in `StreamsForward`
    target_width: int  # D of the target


class Seen(NamedTuple):
    """What an observer kept of a text's passes: entry t belongs to position start[b] + t.

    The first count[b] entries belong to tokens of the text; the others to rejected tokens, or are meaningless.
    """

    features: Any  # leaves [B, T, ...]
    start: Array  # [B] int32
    count: Array  # [B] int32; 0 for finished rows


class Next(NamedTuple):
    """A source's prediction of every row's next position."""

    distribution: Distribution  # read by policies; for drawn tokens also the q of the verifier
    token: Array  # [B] int32, drawn from it; not passed to `check`
    known: Array | None = None  # [B] bool: False ends the row's draft; None: True for all rows


class Source(NamedTuple):
    """Where a round's drafts come from. The draft loop carries the memory: a pytree of constant shapes."""

    open: Callable[[Array], Any]  # rows that begin [B] bool -> memory; feeds tokens that their caches lack
    predict: Callable[[Any, Array, Array], tuple[Next, Any]]  # (memory, drafted [B], uniform [B]) -> (next, memory)
    keep: Callable[[Any, Array, Array, Array], Any]  # (memory, token, is_drafted, drafted), each [B] -> memory after it
    close: Callable[[LoopResult], tuple[DrafterState, LoopResult]]  # the drafter's state and the draft to verify
    cost: Array | float | tuple[float, float] = 1.0  # [B], of a prediction, in passes; 0: a lookup; (first, later) ones
    chosen: Array | bool = False  # [B] bool or one for all: tokens are chosen, not drawn, so q is one-hot
    drafter_id: Array | int = 0  # [B] int32 or one for all
    otherwise: Callable[[Array], "Source"] | None = None  # rows [B] bool without drafts -> the source to use there


class InTurn(NamedTuple):
    """What `close` gets as a draft's memory where `otherwise` was asked too."""

    first: Any  # the source's
    second: Any
    source: Source  # the one that drafted second


Commit = Callable[..., DrafterState]
"""The drafter's state for a text `tokens` [B, S] of which the first `valid` [B] int32 tokens are final.

(params, state, tokens, valid, seen=None) -> state. Called after every round, also for rows that drafted nothing; passes
may be deferred until a row drafts again. Only a drafter with an observer gets `seen` (a Seen), and not where a text is
only truncated.
"""


InitDrafter = Callable[..., DrafterState]
"""(params, batch, slots, source=None) -> a drafter's state for `batch` rows of `slots` (S) slots.

`source` is that of `InitCache`; it is passed only if the target has an encoder.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Drafter(Strategy):
    """A source for each round's draft loop, and the state kept between rounds."""

    init: InitDrafter
    source: Callable[[Params, DrafterState, Array, RoundContext], Source]  # (params, state, tokens [B, S], context)
    commit: Commit
    max_draft_length: int  # K
    model: LanguageModel | None = None  # the drafter's language model, if it has one: `score` uses it
    observe: Observer | None = None  # what to keep of the target's passes
    prefill: Commit | None = None  # as `commit`, for prompts, feeding them at once; None: `commit` is used
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # drafters have none

    def num_passes(self, num_drafts: int) -> int:
        """Passes of a drafter with a model in a round of so many drafts: one each, unless one predicts several."""
        return num_drafts

    @property
    def fill(self) -> Commit:
        """`prefill`, or `commit` for drafters without one."""
        return self.prefill or self.commit

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers that the drafter reads."""
        return () if self.observe is None else self.observe.layers


Observe = Callable[[MonitorState, Array, VerificationResult, RoundContext], MonitorState]
"""The monitor's state after a round: (state, logits, result, context) -> state; logits [B, T, V] are the target's.

It takes logits because only the emitted tokens matter: distributions would be computed at all positions.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Monitor(Strategy):
    """State about the text that policy, drafter and verifier share, updated once a round."""

    init: Init
    observe: Observe
    hyperparameters: Any = None
