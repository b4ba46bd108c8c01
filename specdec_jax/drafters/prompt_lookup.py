"""Prompt lookup: the text's last tokens found earlier in it, and what followed there proposed again.

After Saxena's prompt lookup decoding (2023, apoorvumang/prompt-lookup-decoding), which others ship as n-gram
speculation. No model, and no state but what the target's encoder read: one comparison of the text with its own end,
[B, S], and a copy. It pays where answers quote: summaries, edits, code, arithmetic written out.

Choices the sources make otherwise: of several longest matches the most recent wins (they take the first), because text
close by is more often repeated; and a copy that reaches the end of the text goes on into itself, because a match d
tokens back says that the text has period d (they stop there, after one token in "la la la").
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.decoding.draft_loop import check_length
from specdec_jax.drafters._lookup import draft_by_lookup
from specdec_jax.drafters._stateless import no_commit
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, Drafter, DraftInfo, PolicyState, RoundContext, StoppingPolicy


class _Copy(NamedTuple):
    """What is proposed, token by token."""

    tokens: Array  # [B, K] int32, the whole copy
    matched: Array  # [B] int32, tokens of the match; 0: there is none


@strategy
def prompt_lookup(
    max_draft_length: int = 7,
    longest: int = 3,
    shortest: int = 1,
    uncertainty: bool = True,
    vocab_size: int | None = None,
) -> Drafter:
    """Propose up to `max_draft_length` (K) tokens that followed the longest earlier match of the text's end.

    A row's last n tokens are looked for in its prompt and output, n from `longest` down to `shortest`. Drafting costs
    no model pass. Where the target has an encoder, they are looked for in its source too, as if the text went on from
    there. Verification takes the drafts as one-hot distributions, so lossless verifiers stay so. Parameters are None.

    Args:
        uncertainty: what stopping policies see. True: a match of m tokens, itself m agreements, is right with
            probability (m + 1/2) / (m + 1), and j tokens into the copy the match is m + j long. False: always right.
        vocab_size: of the target; needed by rules that read the drafted token's probability (`build_pair` gives it).

    Raises:
        ValueError: max_draft_length or shortest below 1, or longest below shortest.
    """
    check_length(max_draft_length)
    if not 1 <= shortest <= longest:
        raise ValueError(f"a match has 1 <= shortest <= longest tokens, got shortest {shortest}, longest {longest}")

    def propose(
        params: Any,
        state: Any,
        tokens: Array,
        context: RoundContext,
        uniform: Callable[[Array], Array],
        policy: StoppingPolicy,
        policy_state: PolicyState,
        keep_log_q: bool,
    ) -> tuple[Draft, DraftInfo, Any, PolicyState]:
        del params, keep_log_q
        text, length = after_source(state, tokens, context.length)
        start, matched = find(text, length, longest, shortest)
        copy = _Copy(_copied(text, start, length, max_draft_length), matched)

        def retrieve(memory: tuple[()], drafted: Array) -> tuple[Array, Array, Array]:
            del memory
            return copied_token(copy, drafted)

        draft, info, learnt = draft_by_lookup(
            policy, policy_state, context, uniform, max_draft_length, vocab_size, retrieve
        )
        return draft, info, state, learnt

    def copied_token(copy: _Copy, drafted: Array) -> tuple[Array, Array, Array]:
        index = jnp.minimum(drafted, max_draft_length - 1)
        token = jnp.take_along_axis(copy.tokens, index[:, None], axis=1)[:, 0]
        agreed = (copy.matched + drafted).astype(jnp.float32)
        chance = (agreed + 0.5) / (agreed + 1.0) if uncertainty else jnp.ones_like(agreed)
        return token, copy.matched > 0, chance

    return Drafter(aligned_source, propose, no_commit, max_draft_length)


def aligned_source(params: Any, batch: int, slots: int, source: Any = None) -> Any:
    """What an encoder reads, [B, E] int32 with its last token last; () without one.

    What fills it up at the left is below zero and nowhere twice: it matches nothing.
    """
    del params, batch, slots
    if source is None:
        return ()
    tokens, length = source
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    index = slot - (tokens.shape[1] - length)[:, None]
    return jnp.where(index >= 0, jnp.take_along_axis(tokens, jnp.maximum(index, 0), axis=1), -1 - slot)


def after_source(source: Any, tokens: Array, length: Array) -> tuple[Array, Array]:
    """The text [B, S] of that length [B], and before it the source that there is (`aligned_source`)."""
    if isinstance(source, tuple):
        return tokens, length
    return jnp.concatenate([source, tokens], axis=1), length + source.shape[1]


def find(tokens: Array, length: Array, longest: int, shortest: int) -> tuple[Array, Array]:
    """Where the text's end was before: (index [B] of the token after the match, tokens matched [B], 0 for no match).

    Of the matches of most tokens (at most `longest`, at least `shortest`) the last. `longest` comparisons of [B, S].
    """
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    agrees = slot < length[:, None] - 1  # a match ends at `slot`, before the end itself
    matched = jnp.zeros_like(tokens)
    for back in range(min(longest, slots)):
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)  # [B, 1]
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :slots]  # tokens[b, slot - back]
        agrees = agrees & (earlier == last) & (slot >= back)
        matched = matched + agrees.astype(jnp.int32)
    matched = jnp.where(matched >= shortest, matched, 0)
    most = jnp.max(matched, axis=1)
    end = jnp.max(jnp.where(matched == most[:, None], slot, 0), axis=1)
    return end + 1, most


def _copied(tokens: Array, start: Array, length: Array, most: int) -> Array:
    """The `most` tokens [B, K] from `start` on, the text repeated with period length - start beyond its end."""
    period = jnp.maximum(length - start, 1)[:, None]
    offset = jnp.arange(most, dtype=jnp.int32)[None, :] % period
    return jnp.take_along_axis(tokens, jnp.minimum(start[:, None] + offset, tokens.shape[1] - 1), axis=1)
