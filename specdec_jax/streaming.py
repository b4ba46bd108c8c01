"""Text as it is decoded: one chunk every few rounds, each token with what became of it."""

import time
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.generation import (
    Begun,
    Conversation,
    Generation,
    Pair,
    Request,
    find_stop,
    finish,
    prepare,
    recorded_rounds,
    split_options,
    start,
)
from specdec_jax.loading import StreamDecoder
from specdec_jax.types import DecodeState


class Chunk(NamedTuple):
    """What one round added. `text` never ends inside a character, so it may lag behind `tokens`."""

    text: str
    tokens: list[int]
    kinds: list[str]  # a token: "accepted", "recovered" (a draft was rejected here) or "bonus" (none was)
    rejected: list[int]  # drafts of this round that were rejected
    threshold: float  # the policy's, NaN where it has none


def stream(
    prompt: Conversation, *, pair: Pair | None = None, rounds: int = 1, **options: Any
) -> Generator[Chunk, None, Generation]:
    """Decode one prompt and yield a Chunk for each round, fetched every `rounds` rounds.

    Takes the options of `generate`. The generator's return value (of `yield from`) is the Generation; closing it ends
    the generation early. A stop string ends it too: text from there on is not yielded.

    Raises:
        ValueError: bad input, at the call and not at the first chunk.
    """
    pair, options = split_options(pair, options)
    stop = tuple(options.pop("stop", ()))
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    request = prepare(pair, [prompt], record=True, **options)
    return _stream(pair, request, start(pair, request), stop, rounds)


def _stream(
    pair: Pair, request: Request, begun: Begun, stop: tuple[str, ...], rounds: int
) -> Generator[Chunk, None, Generation]:
    decoder, state = StreamDecoder(pair.target.tokenizer), begun.state
    hold = max((len(word) for word in stop), default=1) - 1  # characters that may begin a stop string
    played, seconds, text, shown = 0, 0.0, "", 0
    while not bool(np.asarray(state.done)[0]):
        watch = time.perf_counter()
        state = jax.block_until_ready(pair.decoder.run(pair.params, state, rounds=rounds))
        seconds += time.perf_counter() - watch
        for chunk in _chunks(state, played):
            played += 1
            text += decoder.push(_without_ends(state, chunk.tokens))
            cut = find_stop(text, stop)
            ready = max(shown, len(text) - hold) if cut is None else cut
            yield chunk._replace(text=text[shown:ready])
            shown = ready
            if cut is not None:
                return finish(pair, request, state, 0, seconds, begun, stop)
    text += decoder.flush()
    if len(text) > shown:
        yield Chunk(text[shown:], [], [], [], float("nan"))
    return finish(pair, request, state, 0, seconds, begun, stop)


def _chunks(state: DecodeState, known: int) -> list[Chunk]:
    """The rounds of row 0 from `known` on, their text still empty."""
    end = int(np.asarray(state.length)[0])
    found = recorded_rounds(state, known=known)
    begin = end - sum(int(round_["emitted"]) for round_ in found)
    tokens = np.asarray(state.tokens)[0].tolist()
    chunks = []
    for round_ in found:
        emitted, accepted, drafted = (int(round_[name]) for name in ("emitted", "accepted", "drafted"))
        last = "bonus" if accepted == drafted else "recovered"
        kinds = ["accepted"] * accepted + [last] * (emitted - accepted)
        rejected = round_["proposed"][accepted:drafted].tolist() if emitted > accepted else []
        chunks.append(Chunk("", tokens[begin : begin + emitted], kinds, rejected, float(round_["threshold"])))
        begin += emitted
    return chunks


def _without_ends(state: DecodeState, tokens: list[int]) -> list[int]:
    ends = set(np.asarray(state.stop_ids).tolist())
    return [token for token in tokens if token not in ends]
