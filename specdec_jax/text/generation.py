"""`generate`: from prompts to text, tokens and statistics."""

import dataclasses
import inspect
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.costs.choices import costs_for
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import readable, slots_for
from specdec_jax.decoding.summaries import recorded_rounds, summarise
from specdec_jax.loading import LoadedModel
from specdec_jax.sharding import committed, on_host, placed
from specdec_jax.strategy import Strategy, nearest
from specdec_jax.text.calibration import Calibration, calibration_of, check_calibration, hyperparameters_for, same_pass
from specdec_jax.text.pair import Pair as Pair
from specdec_jax.text.pair import build_pair as build_pair
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import DecodeState

PROGRAMS = ("prefill", "prefill_drafter", "run")  # programs that a generation compiles
COST = "drafter_cost"  # hyperparameter for the cost of a drafter pass, in target passes
STOP_STRING_ROUNDS = 4  # rounds between searches for stop strings: a search costs a transfer, a round a target pass

Conversation = str | Sequence[Mapping[str, str]]  # a prompt, or messages with `role` and `content`


class Generation(NamedTuple):
    """One row's result. `tokens` has no tokens after the end; a stop string is cut from `text` only."""

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: str  # "stop", "stop_string", "length" or "interrupted"
    statistics: dict[str, Any]  # `decoding.summaries.summarise` of this row
    seconds: float  # decoding time, without prefill and compilation
    prefill_seconds: float
    compile_seconds: float  # 0 if everything was compiled before
    rounds: list[dict[str, Any]] | None = None  # per round, on request
    log_probs: list[float] | None = None  # nats, the target's raw log-probabilities of the tokens, on request
    warped_log_probs: list[float] | None = None  # those of the sampled distribution
    tempered_log_probs: list[float] | None = None  # those at its temperature without truncation


def generate(
    prompt: Conversation | Sequence[Conversation],
    sampling: SamplingParams = SamplingParams(),
    *,
    pair: Pair | None = None,
    record: bool = False,
    **options: Any,
) -> Any:
    """Decode one prompt, or a list of prompts as one batch.

    Args:
        prompt: text, messages, or a list of either (which returns a list of Generations).
        sampling: temperature, seed, stop strings, maximum number of tokens etc.; default: greedy, 128 tokens.
        pair: models and decoder from `build_pair`; None: built from its arguments among the options (`target`,
            `drafter`, `max_draft_length`, `dtype`, `verification_widths` ...), with `costs` and `batch` of
            `measured_pair`: by default costs are measured once per machine and number of prompts, rounded up to 2^n.
        record: record drafted, accepted, threshold and entropies per round in `Generation.rounds`.
        options: `policy`, `verifier`, `monitor`, also with a pair (only other static options need compilation);
            `log_probs=True`, for the log-probabilities of all tokens (`Pair.with_log_probs`); and those of `prepare`:
            chat, system, parse_special, calibration.

    Raises:
        ValueError: invalid input, before anything is compiled.
    """
    many = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Mapping)
    prompts: list[Any] = list(prompt) if many else [prompt]
    if pair is None:  # the next power of two, so that few sizes are measured
        options.setdefault("batch", 1 << (len(prompts) - 1).bit_length())
    pair, options = split_options(pair, options)
    results = decode(pair, prepare(pair, prompts, sampling, record=record, **options)).results
    return results if many else results[0]


class Request(NamedTuple):
    """A checked request: token ids and the arguments of `prefill`."""

    prompts: list[list[int]]
    options: dict[str, Any]
    stop: tuple[str, ...] = ()  # strings that end a text


class Prefilled(NamedTuple):
    """A prefilled state and the time it took."""

    state: DecodeState
    prefill_seconds: float
    compile_seconds: float


class Decoded(NamedTuple):
    """A finished request."""

    results: list[Generation]  # one per row; each has the seconds of the whole batch
    state: DecodeState


def prepare(
    pair: Pair,
    prompts: Sequence[Conversation],
    sampling: SamplingParams = SamplingParams(),
    *,
    chat: bool = True,
    system: str | None = None,
    parse_special: bool = False,
    calibration: str | Path | Calibration | None = None,
    slots: int | None = None,
    record: bool = False,
) -> Request:
    """Tokens and options for `Decoder.prefill`. `sampling.stop_ids` defaults to the target's end of sequence.

    For a target with an encoder the prompt is its source, as plain text: such models have no chat template.
    `parse_special` as in `encode`.

    With a `calibration` (a file of `experiments.calibrate`, or "built-in"), policy, verifier and monitor use the
    hyperparameters calibrated for the pair, except those that were set explicitly. A policy that weighs costs gets the
    costs of the pair.
    """
    ids = [encode(pair.target, prompt, chat=chat, system=system, parse_special=parse_special) for prompt in prompts]
    ends, spec, sources = sampling.stop_ids, pair.target.model.spec, {}
    if ends is None:
        ends = sorted(id_ for id_ in {*spec.eos_ids, *pair.target.tokenizer.eos_ids} if id_ < spec.vocab_size)
    if spec.source is not None:
        ids, sources = [[spec.source.first_token]] * len(ids), {"sources": ids}
    if slots is None:
        slots = slots_for(max(map(len, ids), default=0), sampling.max_new_tokens, max(pair.decoder.parts.widths))
    options = {
        "max_new_tokens": sampling.max_new_tokens,
        "warp": make_warp(len(ids), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
        "seed": sampling.seed,
        "stop_ids": ends,
        **_strategies(pair),
        **learnt_hyperparameters(pair, calibration, sampling.temperature, slots),
        "slots": slots,
        "record_rounds": slots if record else 0,  # large enough, and the same shape for different max_new_tokens
        **sources,
    }
    return Request(ids, options, sampling.stop_strings)


def _strategies(pair: Pair) -> dict[str, Strategy]:
    parts = {"policy": pair.policy, "verifier": pair.verifier, "monitor": pair.monitor}
    return {kind: strategy for kind, strategy in parts.items() if strategy is not None}


def learnt_hyperparameters(pair: Pair, calibration: Any, temperature: float, slots: int) -> dict[str, Any]:
    """`policy_hyperparameters` etc. from a calibration. Plain decoding needs none.

    A policy that weighs costs gets those of the pair: as measured, for this number of cache slots and this temperature,
    or else the cost of a drafter pass, from a calibration of this drafter or from the bytes that both models read.
    """
    learnt: dict[str, dict[str, Any]] = {}
    if calibration is not None and pair.decoder.parts.drafter.max_draft_length == 0:
        check_calibration(calibration)
    elif calibration is not None:
        calibrated = calibration_of(calibration, pair)
        strategies = _strategies(pair).items()
        learnt = {kind: hyperparameters_for(calibrated, kind, rule, temperature) for kind, rule in strategies}
        if not same_pass(calibrated, pair.first_drafter):
            learnt["policy"].pop(COST, None)
    if pair.first_drafter is not None and COST in pair.policy.hyperparameters.keys() - pair.policy.fixed:
        learnt["policy"] = {COST: pair.drafter_cost} | learnt.get("policy", {})
    if pair.costs is not None:
        costs = pair.costs.at(slots, temperature=temperature)
        longest = pair.decoder.parts.drafter.max_draft_length
        learnt["policy"] = learnt.get("policy", {}) | costs_for(pair.policy, costs, longest)
    return {f"{kind}_hyperparameters": values for kind, values in learnt.items()}


def encode(
    target: LoadedModel,
    prompt: Conversation,
    *,
    chat: bool = True,
    system: str | None = None,
    parse_special: bool = False,
) -> list[int]:
    """Token ids of a prompt: with the chat template, or as plain text without `chat` or for an encoder.

    Special tokens in messages, such as `<|im_end|>`, are plain text unless `parse_special`; without the template, where
    the prompt is the model's whole input, they are control tokens. Raises ValueError: the prompt is empty or too long;
    messages or a system prompt without `chat` or for an encoder.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    if (source := target.model.spec.source is not None) or not chat:
        if system is not None or not isinstance(prompt, str):
            encoder = f"{target.name!r} has an encoder and no chat: messages and system prompts are not for it"
            raise ValueError(encoder if source else "a system prompt and messages need the chat template; it is off")
        return encode_text(target, prompt, add_special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return encode_text(target, target.tokenizer.chat(messages, parse_special=parse_special))


def encode_text(target: LoadedModel, text: str, *, add_special: bool = False) -> list[int]:
    """`Tokenizer.encode`. Raises ValueError before it encodes all of a text whose beginning exceeds the context."""
    context = target.model.spec.context
    begin = text[: 8 * context]  # a token of text has four; the last ones may differ from those of the whole text
    if len(begin) < len(text) and (count := len(target.tokenizer.encode(begin))) > 1.25 * context:
        begins = f"the first {len(begin):,} of {len(text):,} characters of the prompt are {count:,} tokens"
        raise ValueError(f"{begins} and exceed the target's context, {context:,}")
    return target.tokenizer.encode(text, add_special=add_special)


def decode(pair: Pair, request: Request) -> Decoded:
    """Start, run to the end with timing, and finish every row. `Generation.seconds` excludes compilation."""
    prefilled = start(pair, request)
    watch = time.perf_counter()
    state = prefilled.state
    if not request.stop:
        state = jax.block_until_ready(pair.decoder.run(pair.params, state))
    while request.stop and not np.all(on_host(state.done)):
        state = pair.decoder.run(pair.params, state, rounds=STOP_STRING_ROUNDS)
        state = end_at_stops(pair, state, [request.stop] * len(state.length))
    seconds = time.perf_counter() - watch
    rows, final = range(len(request.prompts)), readable(state)
    return Decoded([finish(pair, request, final, row, seconds, prefilled) for row in rows], state)


def start(pair: Pair, request: Request) -> Prefilled:
    """Compile if necessary, and prefill. `run` with zero rounds compiles what `compile` has not."""
    decoder, watch = pair.decoder, time.perf_counter()
    programs = decoder.num_programs(*PROGRAMS)
    prefill = decoder.compile(pair.params, request.prompts, **request.options)
    compiled = time.perf_counter()
    state = jax.block_until_ready(prefill())
    filled = time.perf_counter()
    state = jax.block_until_ready(decoder.run(pair.params, state, rounds=0))
    compiling = compiled - watch + time.perf_counter() - filled
    return Prefilled(state, filled - compiled, compiling if decoder.num_programs(*PROGRAMS) > programs else 0.0)


def finish(
    pair: Pair, request: Request, state: DecodeState, row: int, seconds: float, prefilled: Prefilled
) -> Generation:
    """Row `row` of a `readable` state as a Generation; stop tokens are in its tokens but not in its text."""
    length, limit, prompt_length = (int(leaf[row]) for leaf in (state.length, state.limit, state.prompt_length))
    tokens, ends = state.tokens[row, prompt_length:length].tolist(), set(state.stop_ids[row].tolist())
    text = pair.target.tokenizer.decode([token for token in tokens if token not in ends])
    cut = find_stop(text, request.stop)
    reason = "interrupted"
    if cut is not None:
        text, reason = text[:cut], "stop_string"
    elif tokens and tokens[-1] in ends:
        reason = "stop"
    elif length >= limit:
        reason = "length"
    counts = jax.tree.map(lambda leaf: leaf[row : row + 1], state.statistics)
    raw, warped, tempered = [leaf[row, : len(tokens)].tolist() for leaf in state.monitor] or [None] * 3
    return Generation(
        text=text,
        tokens=tokens,
        prompt_tokens=list(request.options.get("sources", request.prompts)[row]),
        finish_reason=reason,
        statistics=summarise(counts),
        seconds=seconds,
        prefill_seconds=prefilled.prefill_seconds,
        compile_seconds=prefilled.compile_seconds,
        rounds=None if state.record is None else recorded_rounds(state, row),
        log_probs=raw,
        warped_log_probs=warped,
        tempered_log_probs=tempered,
    )


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """The index in `text` at which the first completed stop string begins, or None.

    By the end of the stop string, so that the cut does not depend on how much of the text is decoded.
    """
    places = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    return min(places)[1] if places else None


def split_options(pair: Pair | None, options: Mapping[str, Any]) -> tuple[Pair, dict[str, Any]]:
    """The given pair, or one built from the options of `build_pair`; and the remaining options.

    Raises ValueError: an unknown option, with the nearest name.
    """
    builds = {*inspect.signature(build_pair).parameters, "batch"}
    asks = {*inspect.signature(prepare).parameters, "log_probs"} - {"pair", "prompts", "sampling", "record"}
    names = asks | (builds if pair is None else {"policy", "verifier", "monitor"})
    samples = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in options:
        if name not in names:
            why = " (the pair given already has one)" if name in builds else nearest(name, names | samples)
            why = f": it belongs in SamplingParams({name}=...)" if name in samples else why
            raise ValueError(f"generate has no option {name!r}{why}")
    building = {name: value for name, value in options.items() if name not in asks}
    pair = measured_pair(**building) if pair is None else pair.using(**building) if building else pair
    rest = {name: value for name, value in options.items() if name in asks}
    return (pair.with_log_probs() if rest.pop("log_probs", False) else pair), rest


def end_at_stops(pair: Pair, state: DecodeState, stops: Sequence[Sequence[str]]) -> DecodeState:
    """The state with rows marked done whose text contains one of their stop strings."""
    tokens, begin, end, done = on_host((state.tokens, state.prompt_length, state.length, state.done))
    done = done.copy()
    for row, stop in enumerate(stops):
        if stop and not done[row]:
            text = pair.target.tokenizer.decode(tokens[row, begin[row] : end[row]].tolist())
            done[row] = find_stop(text, stop) is not None
    return state._replace(done=placed(done, committed(state.done)))
