"""Streaming of text: one chunk per round, with the kind of each token."""

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.decoding.state import readable
from specdec_jax.decoding.summaries import kinds_of, recorded_rounds
from specdec_jax.loading import StreamDecoder, Tokenizer
from specdec_jax.ranges import Between
from specdec_jax.sharding import on_host
from specdec_jax.text import generation
from specdec_jax.text.generation import Conversation, Generation, Prefilled, Request
from specdec_jax.text.pair import Pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import DecodeState

CONTEXT = 8  # tokens of context for decoding rejected drafts: a first token may decode differently


class Piece(NamedTuple):
    """Text of one kind: the final text of a token, or that of rejected drafts."""

    text: str
    kind: str  # as in `decoding.summaries.kinds_of`, or "rejected"


class Chunk(NamedTuple):
    """The output of one round. `text` may lag: it never ends inside a character or a possible stop string."""

    text: str
    pieces: list[Piece]  # `text` by kind, with rejected drafts at their positions
    tokens: list[int]
    kinds: list[str]  # kind of each token, as in `decoding.summaries.kinds_of`
    rejected: list[int]  # rejected drafts of this round
    threshold: float  # the policy's, NaN if it has none
    log_probs: Sequence[float] = ()  # log-probabilities of the chunk's tokens, as in Generation
    warped_log_probs: Sequence[float] = ()
    tempered_log_probs: Sequence[float] = ()


class Stream(Iterator[Chunk]):
    """The chunks of one generation. `result()` returns the Generation so far, at any time.

    It can continue from another Stream: `previous` is that one's `state`, which is donated. The common prefix of both
    texts is not fed again (`reused` tokens); `can_continue` checks whether a state is compatible.
    """

    def __init__(self, pair: Pair, request: Request, rounds: int, previous: DecodeState | None = None):
        self.pair, self.request, self._rounds = pair, request, rounds
        self.reused = 0 if previous is None else reusable_tokens(previous, request.prompts[0])
        self._prefilled = generation.start(pair, request) if previous is None else resume(pair, request, previous)
        self.state = self._prefilled.state  # after the last completed round, for a Stream that continues from here
        self._seconds = 0.0
        self._chunks = self._play()

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def result(self) -> Generation:
        """The Generation of all tokens decoded so far; its `finish_reason` is "interrupted" before the end."""
        return generation.finish(self.pair, self.request, readable(self.state), 0, self._seconds, self._prefilled)

    def _play(self) -> Iterator[Chunk]:
        text, rounds, decoded = _HeldText(self.pair.target.tokenizer, self.request.stop), 0, 0  # so far
        state = readable(self.state)
        ends, prompt = set(state.stop_ids[0].tolist()), int(state.prompt_length[0])
        while not state.done[0]:
            watch = time.perf_counter()
            with interrupts_held():
                state = self.pair.decoder.run(self.pair.params, self.state, rounds=self._rounds)
                self.state = jax.block_until_ready(state)
            self._seconds += time.perf_counter() - watch
            state = readable(self.state)
            for round_ in recorded_rounds(state, skipped=rounds):
                emitted, accepted, drafted = (int(round_[name]) for name in ("emitted", "accepted", "drafted"))
                new = slice(decoded, decoded + emitted)
                rejected = round_["proposed"][accepted:drafted].tolist() if emitted > accepted else []
                tokens, *log_probs = (leaf[0, new].tolist() for leaf in (state.tokens[:, prompt:], *state.monitor))
                chunk = Chunk("", [], tokens, kinds_of(round_), rejected, float(round_["threshold"]), *log_probs)
                rounds, decoded = rounds + 1, decoded + emitted
                text.add(chunk, ends)
                yield _filled(chunk, text.release())
                if text.ended:
                    return
        if rest := text.release(everything=True):
            yield _filled(Chunk("", [], [], [], [], float("nan")), rest)


def can_continue(pair: Pair, request: Request, previous: DecodeState) -> bool:
    """Whether `resume` accepts the state: one row, the same number of cache slots, and caches of the same shapes.

    Policy and verifier may differ. The caller must ensure that the caches are of the same models.
    """
    slots = request.options["slots"]
    drafter = jax.eval_shape(lambda params: pair.decoder.parts.drafter.init(params, 1, slots), pair.params.drafter)
    same = jax.tree.structure(previous.drafter) == jax.tree.structure(drafter)
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (previous.drafter, drafter)]
    return previous.tokens.shape == (1, slots) and same and shapes[0] == shapes[1]


def reusable_tokens(previous: DecodeState, prompt: Sequence[int]) -> int:
    """Number of tokens of the prompt in the state's target cache, which lacks the last token of its text."""
    ends, tokens = on_host((previous.length, previous.tokens))
    length = int(ends[0])
    before = tokens[0, : min(length, len(prompt))]
    differs = np.flatnonzero(before != np.asarray(prompt[: len(before)], before.dtype))
    return min(int(differs[0]) if len(differs) else len(before), length - 1, len(prompt) - 1)


def resume(pair: Pair, request: Request, previous: DecodeState) -> Prefilled:
    """As `start`, from a state that passes `can_continue`; it is donated. A first call's time counts as compilation.

    Everything except tokens and caches comes from the request, so the state may be that of another policy.
    """
    previous = previous._replace(policy=(), verifier=(), monitor=(), statistics=(), record=None)  # type: ignore[arg-type]
    programs = [pair.decoder.num_programs(name) for name in ("extend", "run")]
    watch = time.perf_counter()
    with interrupts_held():
        state = jax.block_until_ready(pair.decoder.extend(pair.params, previous, request.prompts, **request.options))
        filled = time.perf_counter()
        state = jax.block_until_ready(pair.decoder.run(pair.params, state, rounds=0))
    seconds = filled - watch, time.perf_counter() - filled
    compiled = [pair.decoder.num_programs(name) > programs[i] for i, name in enumerate(("extend", "run"))]
    return Prefilled(state, 0.0 if compiled[0] else seconds[0], float(np.dot(seconds, compiled)))


def stream(
    prompt: Conversation,
    sampling: SamplingParams = SamplingParams(),
    *,
    pair: Pair | None = None,
    rounds: int = 1,
    **options: Any,
) -> Stream:
    """Decode one prompt and iterate over its Chunks, one per round, fetched every `rounds` rounds.

    Takes the options of `generate`. A stop string ends the text and is not part of it. The loop may be left early;
    `result()` is the Generation in any case.

        >>> chunks = stream("Why is the sky blue?")
        >>> for chunk in chunks:
        ...     print(chunk.text, end="", flush=True)
        >>> chunks.result().statistics

    Raises:
        ValueError: invalid input, raised by the call and not by the first chunk.
    """
    pair, options = generation.split_options(pair, options)
    Between(1, whole=True).check("rounds", rounds)
    return Stream(pair, generation.prepare(pair, [prompt], sampling, record=True, **options), rounds)


class _HeldText:
    """Decoded pieces, held back until later tokens cannot change them."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = StreamDecoder(tokenizer)
        self._last: list[int] = []
        self._text, self._released = "", 0  # decoded text, and number of its characters that were released
        self._held: list[Piece] = []
        self._kind = "bonus"  # kind of the last token
        self.ended = False  # whether a stop string is complete

    def add(self, chunk: Chunk, ends: set[int]) -> None:
        """Adds the tokens of a round; ids in `ends` have no text."""
        instead = next((place for place, kind in enumerate(chunk.kinds) if kind in ("branch", "recovered")), None)
        for place, (token, kind) in enumerate(zip(chunk.tokens, chunk.kinds, strict=True)):
            if place == instead:  # position of the rejected drafts
                self._hold(text_after(self._tokenizer, self._last, chunk.rejected), "rejected")
            if token not in ends:
                self._kind = kind
                self._last = [*self._last[1 - CONTEXT :], token]
                self._text += self._hold(self._decoder.push([token]), kind)

    def release(self, everything: bool = False) -> list[Piece]:
        """The pieces that are final; with `everything` all pieces before a stop string."""
        if everything:
            self._text += self._hold(self._decoder.flush(), self._kind)  # an incomplete character, as U+FFFD
        cut = generation.find_stop(self._text, self._stop)
        self.ended = cut is not None
        begun = () if everything else (word[:size] for word in self._stop for size in range(1, len(word)))
        held = max((len(begin) for begin in begun if self._text.endswith(begin)), default=0)  # may become a stop string
        certain = (len(self._text) - held if cut is None else cut) - self._released  # characters to release
        self._released += max(certain, 0)
        ready = []
        while self._held and certain > 0:
            text, kind = self._held.pop(0)
            if kind != "rejected":
                text, later, certain = text[:certain], text[certain:], certain - len(text)
                if later:
                    self._held.insert(0, Piece(later, kind))
            ready.append(Piece(text, kind))
        return ready if cut is not None or not everything else [*ready, *self._held]

    def _hold(self, text: str, kind: str) -> str:
        if text:
            self._held.append(Piece(text, kind))
        return text


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int], *, skip_special: bool = True) -> str:
    """The text of rejected drafts after the tokens before them, of which CONTEXT suffice."""
    decode = functools.partial(tokenizer.decode, skip_special=skip_special)
    begin, text = decode(before), decode([*before, *tokens])
    return text.removeprefix(begin) if text.startswith(begin) else decode(tokens)


def _filled(chunk: Chunk, pieces: list[Piece]) -> Chunk:
    return chunk._replace(text="".join(text for text, kind in pieces if kind != "rejected"), pieces=pieces)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block, in which the old state is donated and the new one not yet assigned."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pressed:
            signal.raise_signal(signal.SIGINT)
