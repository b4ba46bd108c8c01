"""A conversation and its models, without a terminal. It keeps the caches between turns."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from specdec_jax.app.settings import Settings, build, check
from specdec_jax.costs.choices import DRAFTS
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import Tokenizer, refuse_encoders
from specdec_jax.ranges import Between
from specdec_jax.stopping.static import static
from specdec_jax.text.generation import Generation, Pair, Request, build_pair, encode_text, prepare
from specdec_jax.text.streaming import Chunk, Stream, can_continue, interrupts_held
from specdec_jax.types import DecodeState

SPARE = 3  # new caches have slots for this many answers
LEAST_SLOTS = 256


class Turn(NamedTuple):
    """One question and its answer so far."""

    ids: list[int]  # the prompt: the conversation up to the answer
    text: str  # the text of those ids
    result: Generation
    slots: int  # cache slots
    reused: int  # tokens of the prompt that were in the cache from the previous turn
    prefilled: int  # tokens of the prompt that were prefilled
    why: str  # the reason for prefilling them
    settings: Settings  # those of the answer
    tokenizer: Tokenizer


class Session:
    """Messages, settings and the state of the last turn.

    `answer` decodes a turn, `change` sets settings, `reset` deletes the messages. After an error nothing has changed.
    Raises ValueError, OSError: invalid settings, models that cannot be loaded, a target without a chat template.
    """

    def __init__(self, settings: Settings):
        refuse_encoders("chat", settings.target)
        self.settings, self.pair = settings, _built(settings)
        self.messages: list[dict[str, str]] = []
        self.last: Turn | None = None
        self._state: DecodeState | None = None
        self._kept_models: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Maximum draft length, as set or as chosen for this machine."""
        return self.settings.max_draft_length or self.pair.decoder.parts.drafter.max_draft_length or DRAFTS

    def methods(self, length: int) -> list[tuple[str, Pair, Request]]:
        """Name, models and request of plain decoding, static drafts of `length` and the session's own policy, for the
        last prompt. Raises ValueError: there is no answer yet, or the length is out of range.
        """
        if self.last is None or not self.last.ids:
            raise ValueError("there is no prompt to compare on yet: ask something first")
        Between(1, self.longest, whole=True).check("the static length", length)
        ids, plain = self.last.ids, build_pair(self.pair.target, None)
        methods = [("plain", plain, self.request(ids, plain))]
        if self.settings.drafter == "none":
            return methods
        if self.pair.policy.name != "static":
            fixed = self.pair.using(policy=static(draft_length=length))
            methods.append((f"static {length}", fixed, self.request(ids, fixed)))
        return [*methods, (repr(self.pair.policy), self.pair, self.request(ids))]

    def change(self, **values: Any) -> None:
        """Changes settings by the names of `Settings`; new models are loaded here."""
        settings = dataclasses.replace(self.settings, **values)
        if settings.target != self.settings.target:
            refuse_encoders("chat", settings.target)
        pair = _built(settings)
        if settings.target != self.settings.target and self.last is not None:
            self.last = self.last._replace(ids=[], text="")  # ids of another tokenizer
        self.settings, self.pair = settings, pair

    def reset(self) -> None:
        """Deletes the messages. The cache is kept, so that a system prompt need not be prefilled again."""
        self.messages, self.last = [], None

    def answer(self, text: str) -> Iterator[Chunk]:
        """The chunks of the answer to `text`. Leaving the loop early, also by Ctrl-C, keeps the answer so far.

        Raises ValueError: an empty text, or a conversation that exceeds the target's context; raised by the call.
        """
        if not text.strip():
            raise ValueError("the message is empty")
        messages = [*self.messages, {"role": "user", "content": text}]
        settings, tokenizer, last = self.settings, self.pair.target.tokenizer, self.last
        if settings.chat:
            system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
            rendered = tokenizer.chat([*system, *messages], parse_special=settings.parse_special)
        else:  # answers follow their questions
            lines = [("\n" if m["role"] == "user" else "") + m["content"] for m in messages]
            rendered = "".join(lines).removeprefix("\n")
        before = last.text + tokenizer.decode(last.result.tokens, skip_special=False) if last and last.ids else None
        if last is not None and before is not None and rendered.startswith(before):
            # decoded text keeps its ids, which may differ from those of encoding it
            ids = [*last.ids, *last.result.tokens, *encode_text(self.pair.target, rendered[len(before) :])]
        else:
            ids = encode_text(self.pair.target, rendered, add_special=not settings.chat)
        return self._play(messages, rendered, self.request(ids))

    def request(self, ids: list[int], pair: Pair | None = None) -> Request:
        """The request of a prompt's ids with this session's settings, for `pair` (default: the session's).

        Raises ValueError: not enough context for an answer.
        """
        pair, settings = pair or self.pair, self.settings
        context = pair.target.model.spec.context
        new_tokens = min(settings.max_new_tokens, context - len(ids))
        if new_tokens < 1:
            raise ValueError(
                f"the conversation fills the target's context: {len(ids)} of {context} tokens, and none are left "
                "for an answer. /reset begins a new one"
            )
        widest, present = max(pair.decoder.parts.widths), 0 if self._state is None else self._state.tokens.shape[1]
        slots = present  # or more than needed, because every size needs compilation
        if slots_for(len(ids), new_tokens, widest) > present:
            slots = max(slots_for(len(ids), SPARE * new_tokens, widest), LEAST_SLOTS)
        sampling, calibration = dataclasses.replace(settings, max_new_tokens=new_tokens), settings.calibration
        request = prepare(pair, ["-"], sampling, chat=False, calibration=calibration, slots=slots, record=True)
        return request._replace(prompts=[ids])

    def _play(self, messages: list[dict[str, str]], rendered: str, request: Request) -> Iterator[Chunk]:
        state, self._state = self._state, None  # donated below: if the start is interrupted, no state is left
        chunks, why = None, "new in this turn"  # why tokens are prefilled; without a state all are
        if state is None:
            why = "nothing was kept"
        elif self._models() != self._kept_models:
            state, why = None, "the models changed"
        elif not can_continue(self.pair, request, state):
            before, slots = state.tokens.shape[1], request.options["slots"]
            state, why = None, f"the cache grew from {before} to {slots} slots"
        try:
            chunks = Stream(self.pair, request, 1, state)
            yield from chunks
        except Exception:  # in decoding: the state was donated and is lost
            chunks = None
            raise
        finally:
            if chunks is not None:
                with interrupts_held():
                    result, ids = chunks.result(), request.prompts[0]
                    self._state, self._kept_models = chunks.state, self._models()
                    if result.tokens:
                        self.messages = [*messages, {"role": "assistant", "content": result.text}]
                        sizes = request.options["slots"], chunks.reused, len(ids) - chunks.reused
                        tokenizer = chunks.pair.target.tokenizer
                        self.last = Turn(ids, rendered, result, *sizes, why, self.settings, tokenizer)

    def _models(self) -> tuple[Any, ...]:
        return self.settings.target, self.settings.drafter, self.settings.dtype


def _built(settings: Settings) -> Pair:
    check(settings)
    if settings.system is not None and not settings.chat:
        raise ValueError("a system prompt needs the chat template; it is off")
    pair = build(settings)
    if settings.chat and pair.target.tokenizer.chat_template is None:
        raise ValueError(f"{settings.target} has no chat template: it can only continue plain text (--no-chat)")
    return pair
