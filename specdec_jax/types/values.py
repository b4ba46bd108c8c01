"""What is handed about: distributions, drafts, results, counts and the state of a generation. Arrays, no functions."""

from typing import Any, NamedTuple

import jax

Array = jax.Array
Params = Any  # a pytree of weights; always an argument, never closed over
Cache = Any  # a pytree with one buffer a layer and a per-row `length`
PolicyState = Any  # a pytree, every leaf [B, ...]
VerifierState = Any  # a pytree, every leaf [B, ...]
DrafterState = Any  # a pytree
MonitorState = Any  # a pytree, every leaf [B, ...]


class SourceSpec(NamedTuple):
    """What decoding must know of a model with an encoder: every request brings a source, which that reads once."""

    first_token: int  # what the decoder's text begins with
    longest: int  # most tokens of a source


class ModelSpec(NamedTuple):
    """What decoding must know of a model without opening it."""

    vocab_size: int
    context: int  # most positions the model was built for
    eos_ids: tuple[int, ...] = ()
    source: SourceSpec | None = None  # of models with an encoder
    by_position: bool = False  # passes take `positions` and `mask`: several tokens may stand at one position


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


class Drafted(NamedTuple):
    """What came of a round's loop. Entries of a row at and beyond `length` are meaningless, but for the statistics."""

    tokens: Array  # [B, K] int32
    length: Array  # [B] int32
    passes: Array  # [B] int32, positions whose distribution a pass gave; 0 where it is looked up
    log_q: Array | None  # [B, K, V] float32, the distributions as the source gave them
    chosen: Array  # [B] bool, tokens were chosen, not drawn: their distribution is one-hot
    drafter_id: Array  # [B] int32
    entropy: Array  # [B, K] float32, nats, of every distribution asked for; NaN beyond
    max_prob: Array  # [B, K] float32
    policy: PolicyState
    memory: Any  # the source's


class VerificationResult(NamedTuple):
    """The tokens a round emits: accepted drafts, then one recovered or bonus token."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted drafts = length - 1


class RoundContext(NamedTuple):
    """What a round knows before it drafts. Policies, drafters, verifiers and monitors read it; none of them writes it.

    No uniform that drafts or verifies follows from it: a rule that knew them could reject tokens before they are drawn.
    """

    length: Array  # [B] int32, tokens known
    emitted: Array  # [B] int32, tokens emitted when the round began
    budget: Array  # [B] int32, most drafts this round: min(K, tokens left - 1), 0 for finished rows
    alive: Array  # [B] bool, False for finished rows
    policy_seed: Array  # [B] uint32, for rules that need chance (sampling.policy_uniforms)
    warp: Warp
    monitor: MonitorState  # as of the round before
    relative_drafter_cost: Array | None = None  # [B] float32, of `Source.cost`

    @property
    def seed(self) -> Array:
        """Not given: a rule that knows the drafting and verifying uniforms can bias the output."""
        raise ValueError(
            "context.seed: rules get no request's seed; sampling.policy_uniforms(context, n) is their chance"
        )


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
    """Everything a generation carries from round to round; row b's part of it is entry b of every array.

    Donated by every call that takes it.
    """

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32, prompt and emitted tokens
    prompt_length: Array  # [B] int32
    limit: Array  # [B] int32, the length at which a row is done
    done: Array  # [B] bool
    key: Array  # [B, 2] uint32, of its uniforms: a hash of what was read (`sampling.prompt_hashes`), and the seed
    stop_ids: Array  # [B, E] int32, tokens that end a row; -1 pads
    warp: Warp
    target_cache: Cache  # holds every token of a row but the last
    drafter: DrafterState
    policy: PolicyState
    verifier: VerifierState
    monitor: MonitorState
    statistics: Statistics
    record: RoundInfo | None  # every leaf [B, rounds, ...], or None
