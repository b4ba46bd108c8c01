"""The seams: language models, stopping policies, verifiers, drafters and monitors, and the functions they are made of.

Every seam is a record of pure functions; the protocol above it says what each takes and returns. Policies, verifiers,
drafters and monitors are strategies: values that know how they were made (specdec_jax/strategy.py). Arguments are
positional, so an implementation may call them what it likes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from specdec_jax.strategy import Strategy
from specdec_jax.types.defaults import always_begin, always_draw, always_proceed, no_threshold, no_update
from specdec_jax.types.values import (
    Array,
    Cache,
    Distribution,
    Draft,
    Drafted,
    DrafterState,
    ModelSpec,
    MonitorState,
    Params,
    PolicyState,
    RoundContext,
    VerificationResult,
    VerifierState,
)

READ: Any = None  # hyperparameters are read off the signature of `init`


class Init(Protocol):
    """The state of a policy, verifier or monitor before the first round, every leaf [B, ...].

    What else it takes are hyperparameters with defaults, by name; every one is traced.
    """

    def __call__(self, batch: int, /, *args: Any, **hyperparameters: Any) -> Any: ...


class InitCache(Protocol):
    """An empty cache of `slots` (S) slots for `batch` rows.

    `source` is what an encoder reads, here and never again: (tokens [B, E] int32, how many of them count [B] int32).
    None without an encoder.
    """

    def __call__(self, params: Params, batch: int, slots: int, /, source: Any = None) -> Cache: ...


class Forward(Protocol):
    """One pass: tokens [B, T] int32 to (what it gives [B, T, ...] float32, cache).

    Row b's tokens go to slots cache.length[b] ... cache.length[b] + T - 1 and the length grows by T.
    """

    def __call__(
        self, params: Params, tokens: Array, cache: Cache, /, positions: Array | None = None, mask: Array | None = None
    ) -> tuple[Array, Cache]: ...


class StreamsForward(Protocol):
    """A pass that also gives hidden states: tokens [B, T] to (logits [B, T, V], hidden [B, T, N, D] float32, cache).

    `layers` (N of them, static): i is the residual stream after the i-th layer, 0 the embedding.
    """

    def __call__(
        self,
        params: Params,
        tokens: Array,
        cache: Cache,
        layers: tuple[int, ...],
        /,
        positions: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array, Cache]: ...


class Hidden(NamedTuple):
    """What a family gives of its hidden states; what it does not give is None. Nothing is computed unless it is called.

    `last` leaves the last product out: logits are what it gives times the `kernel`.
    """

    last: Forward | None = None  # gives hidden states [B, T, D]
    kernel: Callable[[Params], Any] | None = None  # [V, D], what `models.layers.project` multiplies with
    cap: float | None = None  # of the logits: cap * tanh(product / cap); None: they are the product
    dtype: Any = None  # that the product is taken in; None: the kernel's
    streams: StreamsForward | None = None
    num_layers: int = 0  # L: `streams` gives layers 0 to L
    width: int = 0  # D of `streams`


@dataclass(frozen=True)
class LanguageModel:
    """Two pure functions and a rollback. Parameters are arguments: one compiled program serves any weights."""

    init_cache: InitCache
    apply: Forward  # gives logits [B, T, V]
    with_length: Callable[[Cache, Array], Cache]  # the cache with lengths [B] int32; rollback is a smaller one
    spec: ModelSpec
    hidden: Hidden = Hidden()

    def replace(self, **fields: Any) -> Self:
        """The same model with other functions."""
        return replace(self, **fields)


class Begin(Protocol):
    """Once a round, before the first drafter pass: pay for it? Gives (go_on [B] bool, state)."""

    def __call__(self, state: PolicyState, context: RoundContext, /) -> tuple[Array, PolicyState]: ...


class Check(Protocol):
    """The next position's distribution is known, its token not shown: draft it? Gives (draft [B] bool, state).

    `drafted` [B] int32 counts the drafts of the round so far.
    """

    def __call__(
        self, state: PolicyState, distribution: Distribution, drafted: Array, context: RoundContext, /
    ) -> tuple[Array, PolicyState]: ...


class Proceed(Protocol):
    """The token [B] int32 has become a draft: pay for another pass? Gives (go_on [B] bool, state).

    `drafted` [B] int32 counts it already.
    """

    def __call__(
        self, state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext, /
    ) -> tuple[Array, PolicyState]: ...


class Update(Protocol):
    """What the verification teaches; once a round, before the end-of-sequence cut."""

    def __call__(self, state: PolicyState, draft: Draft, result: VerificationResult, /) -> PolicyState: ...


@dataclass(frozen=True, eq=False, repr=False)
class StoppingPolicy(Strategy):
    """When to stop drafting. Whether a token is drafted is decided without a look at it (docs/design.md, invariant 2).

    A rule gives only what it decides: unless given, every round begins and drafts to its budget, and learns nothing.
    """

    rounds: ClassVar[Any] = None
    """How rounds go whose drafts are not chains: a subclass gives a module such as `contrib.trees.hooks`, by which the
    decoder, the proofs and replays play its rounds."""
    forwarded: ClassVar[tuple[str, ...]] = ()  # further fields that are functions of the state, for wrappers of rules
    init: Init
    begin: Begin = always_begin
    check: Check = always_draw
    proceed: Proceed = always_proceed
    update: Update = no_update
    threshold: Callable[[PolicyState], Array] = (
        no_threshold  # [B] float32, what a plot of this rule shows (NaN: nothing)
    )
    reads: frozenset[str] = frozenset()
    # "phases": a decoder with this rule needs a monitor that watches them; "rows": a row's drafts depend on other rows
    hyperparameters: Mapping[str, Any] = READ  # what `init` takes, with defaults

    @property
    def needs_phases(self) -> bool:
        """Whether it reads the phases of a monitor."""
        return "phases" in self.reads

    @property
    def joins_rows(self) -> bool:
        """Whether what a row does depends on the rows of its batch."""
        return "rows" in self.reads


class NextDistribution(Protocol):
    """Probabilities [B, V] of the token after `accepted` [B] int32 drafts, not necessarily normalised."""

    def __call__(self, accepted: Array, /) -> Array: ...


class Verify(Protocol):
    """Gives (log_prob_accepted [B, K+1], next_distribution, state).

    `distributions` are the target's, with a K+1 axis after B; log_prob_accepted[b, k] = log P(k accepted | draft).
    """

    def __call__(
        self, state: VerifierState, draft: Draft, distributions: Distribution, context: RoundContext, /
    ) -> tuple[Array, NextDistribution, VerifierState]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Verifier(Strategy):
    """How many drafts survive, and the distribution of the token after them."""

    rounds: ClassVar[Any] = None  # as of `StoppingPolicy`, for a verifier that decides about more than chains
    init: Init
    verify: Verify
    lossless: bool  # True: the output distribution is the target's, and a test proves it
    needs_log_q: bool = True
    greedy_only: bool = False  # True: temperatures above 0 are refused
    needs_phases: bool = False  # True: a decoder with this verifier needs a monitor that watches phases
    hyperparameters: Mapping[str, Any] = READ


class Take(Protocol):
    """What a drafter takes of a target pass: a pytree, leaves [B, T, ...].

    `hidden` [B, T, N, D] float32 are the states of its layers, None if it has none; `distributions` are the target's at
    those positions, None in passes over a prompt.
    """

    def __call__(self, params: Params, hidden: Array | None, distributions: Distribution | None, /) -> Any: ...


class Observer(NamedTuple):
    """What a drafter observes of the target, inside the target's own passes; its `commit` and `prefill` get it."""

    take: Take
    layers: tuple[int, ...] = ()  # whose hidden states it reads, N of them, as `StreamsForward` counts
    target_width: int = 0  # D of the target, where there are layers


class Seen(NamedTuple):
    """What an observer took of a text's passes: entry t belongs to position start[b] + t.

    The first count[b] entries are of tokens that stay; the others of rejected tokens, or meaningless.
    """

    taken: Any  # leaves [B, T, ...]
    start: Array  # [B] int32
    count: Array  # [B] int32; 0 for rows that were done
    draft: Draft | None = None  # the draft that was verified after position `start`; None: a prompt


class Next(NamedTuple):
    """The next position of every row, as a source knows it."""

    distribution: Distribution  # what policies read, and of drawn tokens what verifiers divide by
    token: Array  # [B] int32, drawn from it; `check` is not shown it
    known: Array | None = None  # [B] bool: a row without a next position stops; None: all rows have one


class Predict(Protocol):
    """The next position of rows that have drafted so many tokens, [B] int32, and the memory after it."""

    def __call__(self, memory: Any, drafted: Array, uniform: Array, /) -> tuple[Next, Any]: ...


class Keep(Protocol):
    """The memory after `token` [B] was drafted where `is_drafted` [B] bool, as the draft after `drafted` [B] others."""

    def __call__(self, memory: Any, token: Array, is_drafted: Array, drafted: Array, /) -> Any: ...


class Source(NamedTuple):
    """Where a round's next distributions come from. The memory is the loop's to carry: a pytree of constant shapes."""

    open: Callable[[Array], Any]  # rows that begin [B] bool -> memory; feeds what their caches lack
    predict: Predict
    keep: Keep
    close: Callable[[Drafted], tuple[DrafterState, Drafted]]  # the drafter's state after the loop, the draft to verify
    cost: Array | float = 1.0  # [B] float32, of a prediction, in passes of the pair's first model; 0: it is looked up
    chosen: Array | bool = False  # [B] bool or one for all: tokens are chosen, not drawn: their distribution is one-hot
    drafter_id: Array | int = 0  # [B] int32 or one for all
    otherwise: Callable[[Array], "Source"] | None = (
        None  # what drafts in its place for rows [B] that it drafts nothing for
    )


class OpenSource(Protocol):
    """This round's source; `tokens` are [B, S] int32."""

    def __call__(self, params: Params, state: DrafterState, tokens: Array, context: RoundContext, /) -> Source: ...


class Commit(Protocol):
    """The state after a text [B, S] is known to be `valid` [B] int32 tokens long; only those are still what was fed.

    Called after every round, also for rows that drafted nothing: what costs a pass can wait until they draft. A drafter
    with an observer takes a further argument, `seen`; it is left out where a text is only cut.
    """

    def __call__(self, params: Params, state: DrafterState, tokens: Array, valid: Array, /) -> DrafterState: ...


class CommitSeen(Protocol):
    """As `Commit`, of a drafter with an observer: what it took of the target comes along, None where a text is cut."""

    def __call__(
        self, params: Params, state: DrafterState, tokens: Array, valid: Array, seen: Seen | None = None, /
    ) -> DrafterState: ...


class InitDrafter(Protocol):
    """A drafter's state for `batch` rows of `slots` (S) slots.

    `source` is that of `InitCache`, given where the target has an encoder and not at all where it has none.
    """

    def __call__(self, params: Params, batch: int, slots: int, /, source: Any = None) -> DrafterState: ...


@dataclass(frozen=True, eq=False, repr=False)
class Drafter(Strategy):
    """A source for the draft loop, and the state from round to round."""

    drafts_from_model: ClassVar[bool] = True  # False, in a subclass: `model` serves scores and traces only
    init: InitDrafter
    source: OpenSource
    commit: Commit | CommitSeen
    max_draft_length: int  # K
    model: LanguageModel | None = None  # the language model inside, if there is one: `score` reads it
    observe: Observer | None = None  # what it takes of the target's passes
    prefill: Commit | CommitSeen | None = (
        None  # as `commit`, of prompts: what is missing is fed now; None: `commit` does so
    )
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # drafters have none

    @property
    def fill(self) -> Commit | CommitSeen:
        """`prefill`, or `commit` of those that have none."""
        return self.prefill or self.commit

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers that it reads."""
        return () if self.observe is None else self.observe.layers


class Observe(Protocol):
    """The monitor's state after a round; logits [B, T, V] are the target's.

    Logits and not distributions, because only those of the emitted tokens matter: what is made of the others would be
    paid for too.
    """

    def __call__(
        self, state: MonitorState, logits: Array, result: VerificationResult, context: RoundContext, /
    ) -> MonitorState: ...


@dataclass(frozen=True, eq=False, repr=False)
class Monitor(Strategy):
    """What policy, drafter and verifier share about the text, observed once a round."""

    init: Init
    observe: Observe
    hyperparameters: Mapping[str, Any] = READ
