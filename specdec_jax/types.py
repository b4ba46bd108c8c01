"""The vocabulary of specdec_jax: every NamedTuple and callable type. No logic lives here.

Axis legend, used in every comment, docstring and einsum of the project:

    B  rows (independent requests)          V  vocabulary
    T  tokens fed in one pass               L  layers
    K  most drafts a round                  H  attention heads
    S  cache slots                          D  width of the model

Conventions: probabilities are float32 natural logarithms, entropies are in nats, lengths and tokens are int32.
What a factory takes is static (options); what ``init`` takes is traced (hyperparameters), so a sweep compiles once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array
Params = Any  # a pytree of weights; always an argument, never closed over
Cache = Any  # a pytree with one buffer a layer and a per-row `length`
PolicyState = Any  # a pytree, every leaf [B, ...]
VerifierState = Any  # a pytree, every leaf [B, ...]
DrafterState = Any  # a pytree
MonitorState = Any  # a pytree, every leaf [B, ...]


class ModelSpec(NamedTuple):
    """What decoding must know of a model without opening it."""

    vocab_size: int
    context: int  # most positions the model was built for
    eos_ids: tuple[int, ...] = ()
    sharding: Any = None  # None, or a pytree of jax.sharding.Sharding for the parameters


class Head(NamedTuple):
    """A model's last product apart: logits are hidden states times the kernel."""

    hidden: Callable[..., tuple[Array, Cache]]
    # (params, tokens [B, T] i32, cache, positions=None, mask=None) -> (hidden [B, T, D] float32, cache)
    kernel: Callable[[Params], Array]  # (params) -> [V, D], of the dtype that the product is taken in


class ReducedHead(NamedTuple):
    """A pass that gives the logits of N tokens only; the others are never proposed (models/reduced_head.py)."""

    apply: Callable[..., tuple[Array, Cache]]  # (params, tokens [B, T] i32, cache) -> (logits [B, T, N] float32, cache)
    tokens: Callable[[Params], Array]  # (params) -> [N] int32, ascending
    spread: Callable[[Params, Array], Array]  # (params, values [..., N]) -> [..., V], -inf for tokens not among them


class LanguageModel(NamedTuple):
    """Two pure functions and a rollback. Parameters are arguments: one compiled program serves any weights."""

    init_cache: Callable[..., Cache]  # (params, batch, slots, source=None) -> Cache
    apply: Callable[..., tuple[Array, Cache]]
    # (params, tokens [B, T] i32, cache, positions=None, mask=None) -> (logits [B, T, V] float32, cache).
    # Row b's tokens go to slots cache.length[b] ... cache.length[b] + T - 1 and the length grows by T.
    with_length: Callable[[Cache, Array], Cache]  # (cache, length [B]) -> cache; rollback is a smaller length
    spec: ModelSpec
    head: Head | None = None  # of families that can leave their last product out
    reduced: ReducedHead | None = None  # a drafter's: how it drafts without reading its whole head


class Warp(NamedTuple):
    """How logits become the distribution sampled, per row. Hugging Face's order: temperature, top-k, top-p, min-p."""

    temperature: Array  # [B] float32; 0 is greedy
    top_k: Array  # [B] int32; 0 is off
    top_p: Array  # [B] float32 in (0, 1]; 1 is off
    min_p: Array  # [B] float32 in [0, 1]; 0 is off


class Distribution(NamedTuple):
    """A next-token distribution and what rules read of it; at temperature 0 entropy, max_prob and margin are raw."""

    log_prob: Array  # [B, V] float32, the warped distribution; at temperature 0 one-hot
    top_token: Array  # [B] int32, its most probable token
    entropy: Array  # [B] float32, nats, of the distribution as sampled
    max_prob: Array  # [B] float32
    margin: Array  # [B] float32, largest minus second largest probability
    raw_entropy: Array  # [B] float32, nats, at temperature 1 without truncation
    raw_max_prob: Array  # [B] float32
    raw_log_prob: Array | None = None  # [B, V] float32; None where only statistics are known
    token_log_prob: Array | None = None  # [B] float32, of the drawn token, where log_prob is not known: in a replay


class Draft(NamedTuple):
    """What a drafter proposes in one round. Entries at and beyond `length` are meaningless."""

    tokens: Array  # [B, K] int32
    log_q: Array | None
    # [B, K, V] float32, the exact distribution each token was drawn from; None if the verifier needs none
    one_hot: Array  # [B, K] bool, the token was chosen, not drawn: its distribution is 1 on itself
    length: Array  # [B] int32, 0..K


class DraftInfo(NamedTuple):
    """What was measured while drafting; never read back by the loop."""

    passes: Array  # [B] int32, drafter passes spent
    discarded: Array  # [B] int32, passes whose distribution was looked at and gave no token
    entropy: Array  # [B, K] float32, nats, of the distribution each pass gave
    max_prob: Array  # [B, K] float32
    drafter_id: Array  # [B] int32


class VerificationResult(NamedTuple):
    """The tokens a round emits: accepted drafts, then one recovered or bonus token."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted = length - 1


class RoundContext(NamedTuple):
    """What a round knows before it drafts. Policies, drafters, verifiers and monitors read it; nobody writes it.

    No uniform that drafts or verifies follows from it: a rule that knew them could reject tokens before they are drawn.
    """

    length: Array  # [B] int32, tokens known
    emitted: Array  # [B] int32, tokens emitted when the round began
    budget: Array  # [B] int32, most drafts this round: min(K, tokens left - 1), 0 for finished rows
    alive: Array  # [B] bool, False for finished rows
    policy_seed: Array  # [B] uint32, for rules that need chance (sampling.policy_uniforms)
    warp: Warp
    monitor: MonitorState  # as of the round before
    price: Array | None = None
    # [B] float32, set by drafters: a pass of who drafts, in passes of the first model drafter; 0: looked up. None: 1

    @property
    def seed(self) -> Array:
        """Not there: who knows the drafting and verifying uniforms can bias the output."""
        raise ValueError(
            "context.seed: rules get no request's seed; sampling.policy_uniforms(context, n) is their chance"
        )


class StoppingPolicy(NamedTuple):
    """When to stop drafting. Whether a token is drafted is decided before it is drawn (DESIGN, invariant 2)."""

    init: Callable[..., PolicyState]  # (batch, **hyperparameters) -> state; every one is traced
    begin: Callable[[PolicyState, RoundContext], tuple[Array, PolicyState]]
    # once a round, before the first drafter pass: (state, context) -> (go_on [B] bool, state)
    check: Callable[[PolicyState, Distribution, Array, RoundContext], tuple[Array, PolicyState]]
    # distribution of the next position known, token not drawn:
    # (state, distribution, drafted [B], context) -> (draw [B] bool, state)
    proceed: Callable[[PolicyState, Distribution, Array, Array, RoundContext], tuple[Array, PolicyState]]
    # token drawn and kept, pay for another?
    # (state, distribution, token [B], drafted [B], context) -> (go_on [B] bool, state)
    update: Callable[[PolicyState, Draft, VerificationResult], PolicyState]
    # once a round, before the end-of-sequence cut
    threshold: Callable[[PolicyState], Array]  # (state) -> [B] float32, what a plot of this rule shows (NaN: nothing)
    needs_phases: bool = False  # True: a decoder with this rule needs a monitor that watches phases


class Verifier(NamedTuple):
    """How many drafts survive, and the distribution of the token after them."""

    init: Callable[..., VerifierState]  # (batch, **hyperparameters) -> state
    verify: Callable[..., tuple[Array, Callable[[Array], Array], VerifierState]]
    # (state, draft, distributions, context) -> (log_prob_accepted [B, K+1], next_distribution, state)
    # distributions: the target's, with a K+1 axis after B. log_prob_accepted[b, k] = log P(k accepted | draft);
    # next_distribution(k [B]) -> [B, V] probabilities of the token after k accepted drafts (not necessarily
    # normalised).
    lossless: bool  # True: the output distribution is the target's, and a test proves it
    needs_log_q: bool = True
    greedy_only: bool = False  # True: temperatures above 0 are refused
    needs_phases: bool = False  # True: a decoder with this verifier needs a monitor that watches phases


class Observer(NamedTuple):
    """How a drafter sees the target's distributions: `read` takes a little, `learn` gets it after the commit."""

    read: Callable[[Distribution, Draft, VerificationResult, RoundContext], Any]
    # inside the verification branch: (distributions, draft, result, context) -> pytree, leaves [B, T, ...], T the
    # positions this width verifies. The round pads T to K+1; what stands beyond draft.length is meaningless
    learn: Callable[..., DrafterState]
    # (params, state, what was read [B, K+1, ...], draft, tokens [B, S] as of the draft, context) -> state


class Drafter(NamedTuple):
    """Who proposes. `propose` holds the draft loop; a drafter that lags catches up by itself."""

    init: Callable[[Params, int, int], DrafterState]  # (params, batch, slots) -> state
    propose: Callable[..., tuple[Draft, DraftInfo, DrafterState, PolicyState]]
    # (params, state, tokens [B, S], context, uniform, policy, policy_state, keep_log_q)
    # -> (draft, info, state, policy_state); uniform(step []) -> [B] float32 in [0, 1) draws draft `step`: one read each
    commit: Callable[[Params, DrafterState, Array, Array], DrafterState]
    # (params, state, tokens [B, S], valid [B]) -> state; only the first `valid` tokens are still what was fed
    max_draft_length: int  # K
    model: LanguageModel | None = None  # the language model inside, if there is one: `score` reads it
    observer: Observer | None = None  # None: the target's distributions do not reach the drafter


class Monitor(NamedTuple):
    """What policy, drafter and verifier share about the text, observed once a round."""

    init: Callable[..., MonitorState]  # (batch, **hyperparameters) -> state
    observe: Callable[[MonitorState, Array, VerificationResult, RoundContext], MonitorState]
    # (state, logits [B, T, V], result, context) -> state; logits and not distributions, because only those of the
    # emitted tokens matter: what is made of the others would be paid for too


class Phases(NamedTuple):
    """What the monitor `phases` knows of a row; `phase` is what policies, drafters and verifiers read."""

    phase: Array  # [B] int32, 0 routine, 1 reasoning
    entropy: Array  # [B] float32, nats, running mean of the target's over the emitted tokens
    seen: Array  # [B] int32, tokens observed
    lasted: Array  # [B] int32, tokens since the phase began
    enter: Array  # [B] float32, nats
    leave: Array  # [B] float32, nats
    minimum_length: Array  # [B] int32, tokens
    decay: Array  # [B] float32


class Statistics(NamedTuple):
    """Counts of one row since its prompt, after the end-of-sequence cut. Names as in vLLM where it has them."""

    num_rounds: Array  # [B] int32, target passes
    num_drafts: Array  # [B] int32, rounds with at least one draft token
    num_draft_tokens: Array  # [B] int32
    num_accepted_tokens: Array  # [B] int32
    num_emitted_tokens: Array  # [B] int32
    drafter_passes: Array  # [B] int32
    discarded_passes: Array  # [B] int32, drafter passes whose distribution gave no token
    drafted_at: Array  # [B, K] int32, rounds that drafted position k
    evaluated_at: Array  # [B, K] int32, ... in which every earlier draft was accepted and none ended the text
    accepted_at: Array  # [B, K] int32, ... and this one too
    length_histogram: Array  # [B, K+1] int32, rounds by accepted drafts
    num_reasoning_tokens: Array  # [B] int32, emitted in rounds that began in a reasoning phase


class RoundInfo(NamedTuple):
    """One round, as measured; recorded on request and never read back."""

    proposed: Array  # [B, K] int32
    drafted: Array  # [B] int32
    accepted: Array  # [B] int32, after the end-of-sequence cut
    emitted: Array  # [B] int32, after the cut; 0: the row was finished
    drafter_passes: Array  # [B] int32
    discarded: Array  # [B] int32
    width: Array  # [B] int32, verification width
    entropy: Array  # [B, K] float32, nats, per drafter pass
    max_prob: Array  # [B, K] float32
    threshold: Array  # [B] float32, the policy's, before its update
    drafter_id: Array  # [B] int32
    phase: Array  # [B] int32, 0 without a monitor


class DecodeState(NamedTuple):
    """Everything a generation carries from round to round. Donated by every call that takes it."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32, prompt and emitted tokens
    prompt_length: Array  # [B] int32
    limit: Array  # [B] int32, the length at which a row is done
    done: Array  # [B] bool
    seed: Array  # [B] uint32
    stop_ids: Array  # [E] int32, tokens that end a row; -1 pads
    warp: Warp
    target_cache: Cache  # holds every token of a row but the last
    drafter: DrafterState
    policy: PolicyState
    verifier: VerifierState
    monitor: MonitorState
    statistics: Statistics
    record: RoundInfo | None  # every leaf [B, rounds, ...], or None
