"""Records of arrays: distributions, drafts, verification results, counts and the state of a generation."""

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
    """What decoding needs to know about a model with an encoder: every request has a source, encoded once."""

    first_token: int  # first token of the decoder's text
    longest: int  # maximum length of a source


class ModelSpec(NamedTuple):
    """What decoding needs to know about a model."""

    vocab_size: int
    context: int  # maximum number of positions
    eos_ids: tuple[int, ...] = ()
    source: SourceSpec | None = None  # for models with an encoder
    by_position: bool = False  # passes take `positions` and `mask`: several tokens may share a position


class Warp(NamedTuple):
    """Sampling parameters per row, applied in Hugging Face's order: temperature, top-k, top-p, min-p."""

    temperature: Array  # [B] float32; 0: greedy
    top_k: Array  # [B] int32; 0: off
    top_p: Array  # [B] float32 in (0, 1]; 1: off
    min_p: Array  # [B] float32 in [0, 1]; 0: off


class Distribution(NamedTuple):
    """A next-token distribution and its statistics; at temperature 0 entropy, max_prob and margin are the raw ones."""

    log_prob: Array  # [B, V] float32, the warped distribution; at temperature 0 one-hot
    top_token: Array  # [B] int32, its most probable token
    entropy: Array  # [B] float32, nats, of the distribution as sampled
    max_prob: Array  # [B] float32
    margin: Array  # [B] float32, largest minus second largest probability
    raw_entropy: Array  # [B] float32, nats, at temperature 1 without truncation
    raw_max_prob: Array  # [B] float32
    raw_log_prob: Array | None = None  # [B, V] float32; None where only statistics are known
    token_log_prob: Array | None = None  # [B] float32, of the drawn token, if log_prob lacks it


class Draft(NamedTuple):
    """The tokens that a drafter proposes in one round. Entries at and beyond `length` are meaningless."""

    tokens: Array  # [B, K] int32
    log_q: Array | None
    # [B, K, V] float32, the exact distribution each token was drawn from; None if the verifier needs none
    one_hot: Array  # [B, K] bool, the token was chosen, not drawn: its distribution is one-hot
    length: Array  # [B] int32, 0..K


class LoopResult(NamedTuple):
    """The result of a round's draft loop. A row's tokens and log_q at and beyond `length` are meaningless."""

    tokens: Array  # [B, K] int32
    length: Array  # [B] int32
    passes: Array  # [B] int32, positions whose distribution took a drafter pass; 0 for lookups
    log_q: Array | None  # [B, K, V] float32, the source's distributions
    chosen: Array  # [B] bool, tokens were chosen, not drawn: their distribution is one-hot
    drafter_id: Array  # [B] int32
    entropy: Array  # [B, K] float32, nats, of every predicted distribution; NaN beyond
    max_prob: Array  # [B, K] float32
    policy: PolicyState
    memory: Any  # the source's


class VerificationResult(NamedTuple):
    """The tokens a round emits: accepted drafts, then one recovered or bonus token."""

    tokens: Array  # [B, K+1] int32
    length: Array  # [B] int32, 1..K+1; accepted drafts = length - 1


class RoundContext(NamedTuple):
    """The state of the text before a round drafts. Read by policies, drafters, verifiers and monitors; never modified.

    The uniforms of drafting and verification cannot be derived from it: a rule that knew them could bias the output.
    """

    length: Array  # [B] int32, prompt and emitted tokens
    emitted: Array  # [B] int32, tokens emitted when the round began
    budget: Array  # [B] int32, maximum draft length this round: min(K, tokens left - 1), 0 for finished rows
    alive: Array  # [B] bool, False for finished rows
    policy_seed: Array  # [B] uint32, for rules that draw random numbers (sampling.policy_uniforms)
    warp: Warp
    monitor: MonitorState  # as of the round before
    relative_drafter_cost: Array | None = None  # [B] float32, the source's `cost`; [B, 2] for a pair


class Statistics(NamedTuple):
    """Counts per row since its prompt, after the end-of-sequence cut. Named as in vLLM where it has the same count."""

    num_rounds: Array  # [B] int32, target passes
    num_drafts: Array  # [B] int32, rounds with at least one draft token
    num_draft_tokens: Array  # [B] int32
    num_accepted_tokens: Array  # [B] int32
    num_emitted_tokens: Array  # [B] int32
    drafter_passes: Array  # [B] int32
    discarded_passes: Array  # [B] int32, drafter passes whose distribution gave no token
    drafted_at: Array  # [B, K] int32, rounds that drafted position k
    evaluated_at: Array  # [B, K] int32, rounds that drafted k and accepted all drafts before it, and the text went on
    accepted_at: Array  # [B, K] int32, rounds that accepted draft k
    length_histogram: Array  # [B, K+1] int32, rounds by accepted drafts
    num_reasoning_tokens: Array  # [B] int32, emitted in rounds that began in a reasoning phase


class RoundInfo(NamedTuple):
    """Measurements of one round; recorded on request, and not read by decoding."""

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
    """The state of a generation between rounds; row b is entry b of every array.

    Donated by every call that takes it.
    """

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32, prompt and emitted tokens
    prompt_length: Array  # [B] int32
    limit: Array  # [B] int32, the length at which a row is finished
    done: Array  # [B] bool
    key: Array  # [B, 2] uint32, key of the row's uniforms: hash of its inputs (`sampling.prompt_hashes`), seed
    stop_ids: Array  # [B, E] int32, tokens that end a row; -1 pads
    warp: Warp
    target_cache: Cache  # holds all tokens of a row but the last
    drafter: DrafterState
    policy: PolicyState
    verifier: VerifierState
    monitor: MonitorState
    statistics: Statistics
    record: RoundInfo | None  # every leaf [B, rounds, ...], or None
