"""A conversation and its models, without a terminal. It keeps the cache of what was said from turn to turn."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from specdec_jax.app.settings import Settings, build, check
from specdec_jax.costs.choices import DRAFTS
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import refuse_encoders
from specdec_jax.stopping.static import static
from specdec_jax.text.generation import Generation, Pair, Request, build_pair, prepare
from specdec_jax.text.streaming import Chunk, Stream, can_continue, interrupts_held
from specdec_jax.types import DecodeState

SPARE = 3  # answers that new caches have room for
LEAST_SLOTS = 256


class Turn(NamedTuple):
    """One question and its answer, as far as it came."""

    ids: list[int]  # the prompt: all of the conversation up to the answer
    text: str  # what those ids stand for
    result: Generation
    slots: int  # of the caches
    reused: int  # tokens of the prompt that the cache held from the turn before
    prefilled: int  # tokens of the prompt that were read
    why: str  # why they were read
    settings: Settings  # what it was decoded with


class Session:
    """Messages, settings and the state of the last turn.

    `answer` decodes a turn, `change` other settings, `reset` forgets the messages. What raises leaves all as it was.

        >>> session = Session(Settings(policy="static"))
        >>> for chunk in session.answer("Why is the sky blue?"):
        ...     print(chunk.text, end="", flush=True)
        >>> session.last.result.statistics

    Raises:
        ValueError, OSError: settings that cannot be, models that cannot be loaded, a target without a chat template.
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
        """Tokens drafted a round at most, as set or as chosen for this machine."""
        return self.settings.max_draft_length or self.pair.decoder.parts.drafter.max_draft_length or DRAFTS

    def methods(self, length: int) -> list[tuple[str, Pair, Request]]:
        """The last prompt by plain decoding, static drafts of `length` and the session's own policy: name, models and
        request of each. Plain decoding has no verifier to be changed by.

        Raises:
            ValueError: there is no answer yet, or the length is out of range.
        """
        if self.last is None or not self.last.ids:
            raise ValueError("there is no prompt to compare on yet: ask something first")
        if not 1 <= length <= (longest := self.longest):
            raise ValueError(f"the static length must lie in 1 to max_draft_length, {longest}, got {length}")
        ids, plain = self.last.ids, build_pair(self.pair.target, None)
        methods = [("plain", plain, self.request(ids, plain))]
        if self.settings.drafter == "none":
            return methods
        if self.pair.policy.name != "static":
            fixed = self.pair.using(policy=static(draft_length=length))
            methods.append((f"static {length}", fixed, self.request(ids, fixed)))
        return [*methods, (repr(self.pair.policy), self.pair, self.request(ids))]

    def change(self, **values: Any) -> None:
        """Other settings, by the names of `Settings`; a new model is loaded here."""
        settings = dataclasses.replace(self.settings, **values)
        if settings.target != self.settings.target:
            refuse_encoders("chat", settings.target)
        pair = _built(settings)
        if settings.target != self.settings.target and self.last is not None:
            self.last = self.last._replace(ids=[], text="")  # another tokenizer's ids
        self.settings, self.pair = settings, pair

    def reset(self) -> None:
        """Forget the messages. The cache stays: a system prompt need not be read again."""
        self.messages, self.last = [], None

    def answer(self, text: str) -> Iterator[Chunk]:
        """The chunks of the answer to `text`. Leaving the loop early, by Ctrl-C too, keeps what came until then.

        Raises:
            ValueError: an empty text, or a conversation that fills the target's context; at the call.
        """
        if not text.strip():
            raise ValueError("the message is empty")
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._rendered(messages)
        return self._play(messages, rendered, self.request(self._ids(rendered)))

    def request(self, ids: list[int], pair: Pair | None = None) -> Request:
        """A prompt's ids with this session's settings, for `pair` (the session's own unless given).

        Raises:
            ValueError: no room for an answer.
        """
        pair, settings = pair or self.pair, self.settings
        context = pair.target.model.spec.context
        new_tokens = min(settings.max_new_tokens, context - len(ids))
        if new_tokens < 1:
            raise ValueError(
                f"the conversation fills the target's context: {len(ids)} of {context} tokens, and none are left "
                "for an answer. /reset begins a new one"
            )
        slots = self._slots(len(ids), new_tokens, max(pair.decoder.parts.widths))
        request = prepare(
            pair,
            ["-"],
            dataclasses.replace(settings, max_new_tokens=new_tokens),
            chat=False,
            calibration=settings.calibration,
            slots=slots,
            record=True,
        )
        return request._replace(prompts=[ids])

    def _slots(self, prompt: int, new_tokens: int, widest: int) -> int:
        """As many cache slots as there are, or with more room than is needed: every size compiles anew."""
        present = 0 if self._state is None else self._state.tokens.shape[1]
        needed = slots_for(prompt, new_tokens, widest)
        return present if needed <= present else max(slots_for(prompt, SPARE * new_tokens, widest), LEAST_SLOTS)

    def _play(self, messages: list[dict[str, str]], rendered: str, request: Request) -> Iterator[Chunk]:
        state, self._state = self._state, None  # donated from here on: if the start is interrupted, there is none
        state, why = self._usable(state, request)
        chunks = None
        try:
            chunks = Stream(self.pair, request, 1, state)
            yield from chunks
        except Exception:  # while it ran: its state was donated and is gone
            chunks = None
            raise
        finally:
            if chunks is not None:
                with interrupts_held():
                    self._keep(messages, rendered, request, chunks, why)

    def _usable(self, state: DecodeState | None, request: Request) -> tuple[DecodeState | None, str]:
        """The kept state if this turn can go on from it, and why tokens are read."""
        if state is None:
            return None, "nothing was kept"
        if self._models() != self._kept_models:
            return None, "the models changed"
        if not can_continue(self.pair, request, state):
            return None, f"the cache grew from {state.tokens.shape[1]} to {request.options['slots']} slots"
        return state, "new in this turn"

    def _keep(self, messages: list[dict[str, str]], rendered: str, request: Request, chunks: Stream, why: str) -> None:
        result, ids = chunks.result(), request.prompts[0]
        self._state, self._kept_models = chunks.state, self._models()
        if result.tokens:
            self.messages = [*messages, {"role": "assistant", "content": result.text}]
            slots = request.options["slots"]
            read = len(ids) - chunks.reused
            self.last = Turn(ids, rendered, result, slots, chunks.reused, read, why, self.settings)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if not self.settings.chat:
            lines = [("\n" if m["role"] == "user" else "") + m["content"] for m in messages]  # an answer goes on
            return "".join(lines).removeprefix("\n")
        if self.settings.system is not None:
            messages = [{"role": "system", "content": self.settings.system}, *messages]
        return self.pair.target.tokenizer.chat(messages)

    def _ids(self, rendered: str) -> list[int]:
        """The text's ids. What was decoded keeps the ids it was decoded as, which may not be how it is encoded."""
        tokenizer, last = self.pair.target.tokenizer, self.last
        if last is not None and last.ids:
            before = last.text + tokenizer.decode(last.result.tokens, skip_special=False)
            if rendered.startswith(before):
                return [*last.ids, *last.result.tokens, *tokenizer.encode(rendered[len(before) :])]
        return tokenizer.encode(rendered, add_special=not self.settings.chat)

    def _models(self) -> tuple[Any, ...]:
        settings = self.settings
        return settings.target, settings.drafter, settings.dtype


def _built(settings: Settings) -> Pair:
    policy, verifier = check(settings)
    if settings.system is not None and not settings.chat:
        raise ValueError("a system prompt needs the chat template; it is off")
    pair = build(settings, policy, verifier)
    if settings.chat and pair.target.tokenizer.chat_template is None:
        raise ValueError(f"{settings.target} has no chat template: it can only continue plain text (--no-chat)")
    return pair
