"""A recorded generation, token by token: the data of all views of a decoded text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.decoding.summaries import kinds_of
from specdec_jax.loading import StreamDecoder, Tokenizer
from specdec_jax.text.generation import Generation
from specdec_jax.text.streaming import CONTEXT, text_after

PHASES = ("routine", "reasoning")


class Rejected(NamedTuple):
    """A rejected draft."""

    id: int
    text: str
    entropy: float  # nats, of the drafter's distribution it was drawn from; NaN: unknown
    max_prob: float


class Token(NamedTuple):
    """One emitted token. `entropy` and `max_prob` are of the drafter's distribution there, NaN where no pass looked."""

    id: int
    text: str  # whole characters that this token completes; all texts together are Generation.text
    kind: str  # as in `decoding.summaries.kinds_of`
    ends: bool  # whether it is the end of sequence, without text
    rejected: tuple[Rejected, ...]  # rejected drafts from this position on, which the target's token replaced
    entropy: float  # nats
    max_prob: float
    threshold: float  # the policy's threshold in this round, in its own units; NaN if it has none
    round: int  # from 0
    first: bool  # whether it is the first of its round
    phase: int  # 0 routine, 1 reasoning
    drafter: int


def tokens_of(generation: Generation, tokenizer: Tokenizer) -> list[Token]:
    """The tokens of a generation with rounds (`generate(..., record=True)`), in order.

    Raises:
        ValueError: it was not recorded, or its rounds are not those of its tokens.
    """
    if generation.rounds is None:
        raise ValueError("this generation has no rounds to draw: decode it with record=True")
    emitted = sum(int(round_["emitted"]) for round_ in generation.rounds)
    if emitted != len(generation.tokens):
        raise ValueError(f"the rounds emitted {emitted} tokens, the generation has {len(generation.tokens)}")
    # the part of Generation.text by each token; empty for the end of sequence and after a stop string
    decoder, texts, remaining = StreamDecoder(tokenizer), [], len(generation.text)
    silent = 1 if generation.finish_reason == "stop" else 0
    spoken = generation.tokens[: len(generation.tokens) - silent]
    for index, token in enumerate(spoken):
        text = decoder.push([token]) + (decoder.flush() if index == len(spoken) - 1 else "")
        texts.append(text[:remaining])
        remaining -= len(texts[-1])
    texts += [""] * silent
    tokens: list[Token] = []
    begin = 0
    for index, round_ in enumerate(generation.rounds):
        count = int(round_["emitted"])
        before = generation.tokens[max(begin - CONTEXT, 0) : begin]
        tokens += _round(index, round_, generation.tokens[begin : begin + count], before, tokenizer)
        begin += count
    if tokens and generation.finish_reason == "stop":
        tokens[-1] = tokens[-1]._replace(ends=True)
    return [token._replace(text=text) for token, text in zip(tokens, texts, strict=True)]


def phases_of(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """The reasoning phases as half-open ranges (first, last + 1) of positions."""
    inside = [False, *(token.phase == 1 for token in tokens), False]
    turns = [i for i in range(len(inside) - 1) if inside[i] != inside[i + 1]]
    return list(zip(turns[::2], turns[1::2], strict=True))


def bound(entropy: float, entropy_factor: float) -> float:
    """AdaEDL's lower bound on the acceptance probability, 1 - sqrt(factor * entropy) (arXiv 2410.18351), which it
    compares with lambda; at least 0."""
    return max(1.0 - math.sqrt(entropy_factor * entropy), 0.0) if entropy >= 0 else math.nan


def _round(
    index: int, round_: Mapping[str, Any], emitted: Sequence[int], before: Sequence[int], tokenizer: Tokenizer
) -> list[Token]:
    accepted, drafted = int(round_["accepted"]), int(round_["drafted"])
    kinds = kinds_of(round_)
    # A round that ended within its accepted drafts has no token of the target, and its further drafts are wasted.
    turned_down = range(accepted, drafted) if len(emitted) > accepted else range(0)
    before = [*before, *emitted[:accepted]]
    rejected = []
    for place in turned_down:
        token = int(round_["proposed"][place])
        text = text_after(tokenizer, before, [token], skip_special=False)  # shows an end of sequence, too
        rejected.append(Rejected(token, text, *_distribution(round_, place)))
        before.append(token)
    tokens = []
    for place, token in enumerate(emitted):
        entropy, max_prob = _distribution(round_, place)
        tokens.append(
            Token(
                id=int(token),
                text="",
                kind=kinds[place],
                ends=False,
                rejected=tuple(rejected) if place == accepted else (),
                entropy=entropy,
                max_prob=max_prob,
                threshold=_number(round_["threshold"]),
                round=index,
                first=place == 0,
                phase=int(round_["phase"]),
                drafter=int(round_["drafter_id"]),
            )
        )
    return tokens


def _distribution(round_: Mapping[str, Any], place: int) -> tuple[float, float]:
    """Entropy and largest probability of the drafter's distribution at a place of its round."""
    entropies, chances = round_["entropy"], round_["max_prob"]
    return (_number(entropies[place]), _number(chances[place])) if place < len(entropies) else (math.nan, math.nan)


def _number(value: Any) -> float:
    """The value as float; None, the JSON form of NaN, as NaN."""
    return math.nan if value is None else float(np.float32(value))
