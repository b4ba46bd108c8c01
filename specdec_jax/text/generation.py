"""Text in; text, tokens and statistics out. The call a user makes first."""

import dataclasses
import inspect
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.costs.at_hand import look_at
from specdec_jax.costs.choices import costs_for
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import readable, slots_for
from specdec_jax.decoding.statistics import recorded_rounds, summarise
from specdec_jax.loading import LoadedModel
from specdec_jax.sharding import on_host, placed
from specdec_jax.strategy import Strategy, nearest
from specdec_jax.text.calibration import Calibration, calibration_of, check_calibration, hyperparameters_for, same_pass
from specdec_jax.text.pair import Pair as Pair
from specdec_jax.text.pair import build_pair as build_pair
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import DecodeState

PROGRAMS = ("prefill", "prefill_drafter", "run")  # that a generation compiles
COST = "drafter_cost"  # the hyperparameter by which rules know what a drafter pass costs, in target passes
STOP_STRING_ROUNDS = 4  # rounds between two searches for stop strings: one costs a transfer, a round a target pass

Conversation = str | Sequence[Mapping[str, str]]  # a prompt, or messages with `role` and `content`


class Generation(NamedTuple):
    """One row's result. Tokens after the end are not among `tokens`; a stop string is cut from `text` only."""

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: str  # "stop", "stop_string", "length" or "interrupted"
    statistics: dict[str, Any]  # specdec_jax.decoding.statistics.summarise of this row
    seconds: float  # decoding, without prefill and compilation
    prefill_seconds: float
    compile_seconds: float  # 0 when everything was compiled before
    rounds: list[dict[str, Any]] | None = None  # per round, when asked for
    log_probs: list[float] | None = None  # nats, the target's raw ones of the tokens, when asked for
    warped_log_probs: list[float] | None = None  # of the distribution as sampled


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
        prompt: text, messages, or a list of either (then a list of Generations comes back).
        sampling: temperature, seed, stop strings, most tokens and the rest; greedy, at most 128 tokens unless given.
        pair: models and decoder of `build_pair`; without one, its arguments among the options (`target`, `drafter`,
            `max_draft_length`, `dtype`, `verification_widths` ...) build it, with `costs` and `batch` of
            `measured_pair`: by default the pair's costs are measured, once a machine.
        record: per-round drafted, accepted, threshold and entropies in `Generation.rounds`.
        options: `policy`, `verifier`, `monitor`, with a pair too (only other static options compile anew);
            `log_probs=True`, for those of all tokens (`Pair.with_log_probs`); and those of `prepare`: chat, system,
            calibration.

    Raises:
        ValueError: bad input, named, before anything compiles.
    """
    pair, options = split_options(pair, options)
    many = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Mapping)
    prompts: list[Any] = list(prompt) if many else [prompt]
    request = prepare(pair, prompts, sampling, record=record, **options)
    results = decode(pair, request).results
    return results if many else results[0]


class Request(NamedTuple):
    """A checked request: token ids and what `prefill` takes."""

    prompts: list[list[int]]
    options: dict[str, Any]
    stop: tuple[str, ...] = ()  # strings that end a text


class Prefilled(NamedTuple):
    """A prefilled state and what it took."""

    state: DecodeState
    prefill_seconds: float
    compile_seconds: float


class Decoded(NamedTuple):
    """A request decoded to its end."""

    results: list[Generation]  # one a row; each has the seconds of the whole batch
    state: DecodeState


def prepare(
    pair: Pair,
    prompts: Sequence[Conversation],
    sampling: SamplingParams = SamplingParams(),
    *,
    chat: bool = True,
    system: str | None = None,
    calibration: str | Path | Calibration | None = None,
    slots: int | None = None,
    record: bool = False,
) -> Request:
    """Tokens and options for `Decoder.prefill`. The target's own end of sequence unless `sampling.stop_ids` is given.

    A prompt for a target with an encoder is its source, taken as plain text: such models have no chat.

    With a `calibration` (a file of `experiments.calibrate`, or "built-in"), policy, verifier and monitor have the
    hyperparameters learnt for the pair, except those that the pair's strategies were given. A rule that weighs costs
    gets the pair's.
    """
    ids = [encode(pair.target, prompt, chat=chat, system=system) for prompt in prompts]
    tokenizer, ends, reads = pair.target.tokenizer, sampling.stop_ids, pair.target.model.spec.source
    sources = {} if reads is None else {"sources": ids}
    ids = ids if reads is None else [[reads.first_token]] * len(ids)
    if slots is None:
        slots = slots_for(max(map(len, ids), default=0), sampling.max_new_tokens, max(pair.decoder.parts.widths))
    options = {
        "max_new_tokens": sampling.max_new_tokens,
        "warp": make_warp(len(ids), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
        "seed": sampling.seed,
        "stop_ids": sorted({*pair.target.model.spec.eos_ids, *tokenizer.eos_ids}) if ends is None else list(ends),
        **{kind: strategy for kind, strategy in _strategies(pair).items() if strategy is not None},
        **learnt_hyperparameters(pair, calibration, sampling.temperature, slots),
        "slots": slots,
        "record_rounds": slots if record else 0,  # enough, and no shape of its own for every max_new_tokens
        **sources,
    }
    return Request(ids, options, sampling.stop_strings)


def _strategies(pair: Pair) -> dict[str, Strategy | None]:
    return {"policy": pair.policy, "verifier": pair.verifier, "monitor": pair.monitor}


def learnt_hyperparameters(pair: Pair, calibration: Any, temperature: float, slots: int) -> dict[str, Any]:
    """`policy_hyperparameters` and the rest that a calibration has. Plain decoding needs none.

    A rule that weighs costs gets those of the pair: as measured, with so many cache slots, or else a drafter pass's,
    from a calibration of this very drafter or from the bytes that both models read.
    """
    learnt: dict[str, dict[str, Any]] = {}
    if calibration is not None and pair.decoder.parts.drafter.max_draft_length == 0:
        check_calibration(calibration)
    elif calibration is not None:
        calibrated = calibration_of(calibration, pair)
        learnt = {
            kind: hyperparameters_for(calibrated, kind, strategy, temperature)
            for kind, strategy in _strategies(pair).items()
            if strategy is not None
        }
        if not same_pass(calibrated, pair.first_drafter):
            learnt["policy"].pop(COST, None)
    if pair.first_drafter is not None and COST in pair.policy.hyperparameters.keys() - pair.policy.fixed:
        learnt["policy"] = {COST: pair.drafter_cost} | learnt.get("policy", {})
    if pair.costs is not None:
        longest = pair.decoder.parts.drafter.max_draft_length
        learnt["policy"] = learnt.get("policy", {}) | costs_for(pair.policy, pair.costs.at(slots), longest)
    return {f"{kind}_hyperparameters": values for kind, values in learnt.items()}


def encode(target: LoadedModel, prompt: Conversation, *, chat: bool = True, system: str | None = None) -> list[int]:
    """Token ids of a prompt: through the chat template, or as plain text when `chat` is off, or for an encoder.

    Raises:
        ValueError: the prompt is empty, or messages or a system prompt come with the template off or for an encoder.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    if target.model.spec.source is not None:
        if system is not None or not isinstance(prompt, str):
            raise ValueError(f"{target.name!r} has an encoder and no chat: messages and system prompts are not for it")
        return target.tokenizer.encode(prompt, add_special=True)
    if not chat:
        if system is not None or not isinstance(prompt, str):
            raise ValueError("a system prompt and messages need the chat template; it is off")
        return target.tokenizer.encode(prompt, add_special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return target.tokenizer.encode(target.tokenizer.chat(messages))


def decode(pair: Pair, request: Request) -> Decoded:
    """Start, run to the end by the clock, and finish every row. What compiles is not in `Generation.seconds`."""
    prefilled = start(pair, request)
    watch = time.perf_counter()
    state = jax.block_until_ready(_run(pair, prefilled.state, request.stop))
    seconds = time.perf_counter() - watch
    rows, final = range(len(request.prompts)), readable(state)
    look_at_costs(pair, request, final, seconds)
    return Decoded([finish(pair, request, final, row, seconds, prefilled) for row in rows], state)


def look_at_costs(pair: Pair, request: Request, state: DecodeState, seconds: float) -> None:
    """Compares measured costs with the rounds of one row, drafted by one model, in no more slots than costs have."""
    costs, model = pair.costs, pair.decoder.parts.drafter.model
    described = costs is not None and costs.ratio and model is not None and state.tokens.shape[1] <= costs.slots
    # between rounds a request with stop strings looks for them
    if costs is not None and described and costs.batch == 1 and not request.stop:
        look_at(costs, state.statistics, seconds)


def start(pair: Pair, request: Request) -> Prefilled:
    """Compile what is not yet, and prefill: `run` with zero rounds compiles the whole generation and plays none."""
    decoder, watch = pair.decoder, time.perf_counter()
    programs = decoder.num_programs(*PROGRAMS)
    decoder.compile_prefill(pair.params, request.prompts, **request.options)
    compiled = time.perf_counter()
    state = jax.block_until_ready(decoder.prefill(pair.params, request.prompts, **request.options))
    filled = time.perf_counter()
    state = jax.block_until_ready(decoder.run(pair.params, state, rounds=0))
    compiling = compiled - watch + time.perf_counter() - filled
    return Prefilled(state, filled - compiled, compiling if decoder.num_programs(*PROGRAMS) > programs else 0.0)


def finish(
    pair: Pair, request: Request, state: DecodeState, row: int, seconds: float, prefilled: Prefilled
) -> Generation:
    """Row `row` of a `readable` state as a Generation; ids that end a text are among the tokens and not in the text."""
    length, limit, prompt_length = (int(leaf[row]) for leaf in (state.length, state.limit, state.prompt_length))
    tokens = [int(token) for token in state.tokens[row, prompt_length:length]]
    ends = set(state.stop_ids[row].tolist())
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
    rounds = None if state.record is None else recorded_rounds(state, row)
    raw, warped = [leaf[row, : len(tokens)].tolist() for leaf in state.monitor] or (None, None)
    return Generation(
        text=text,
        tokens=tokens,
        prompt_tokens=list(request.options.get("sources", request.prompts)[row]),
        finish_reason=reason,
        statistics=summarise(counts),
        seconds=seconds,
        prefill_seconds=prefilled.prefill_seconds,
        compile_seconds=prefilled.compile_seconds,
        rounds=rounds,
        log_probs=raw,
        warped_log_probs=warped,
    )


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins in `text`, or None.

    Complete first, not begun first: what a text is cut at must not depend on how much of it is known.
    """
    places = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    return min(places)[1] if places else None


def split_options(pair: Pair | None, options: Mapping[str, Any]) -> tuple[Pair, dict[str, Any]]:
    """The pair given, or one built from the options that `build_pair` takes; and the rest of the options.

    Raises:
        ValueError: an unknown option, with the nearest name.
    """
    builds = {*inspect.signature(build_pair).parameters, "batch"}
    asks = set(inspect.signature(prepare).parameters) - {"pair", "prompts", "sampling", "record"}
    changes = {"policy", "verifier", "monitor"}
    names = asks | (builds if pair is None else changes) | {"log_probs"}
    samples = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in options:
        if name not in names:
            why = " (the pair given already has one)" if name in builds else nearest(name, names | samples)
            why = f": it belongs in SamplingParams({name}=...)" if name in samples else why
            raise ValueError(f"generate has no option {name!r}{why}")
    building = {name: value for name, value in options.items() if name not in asks | {"log_probs"}}
    pair = measured_pair(**building) if pair is None else pair.using(**building) if building else pair
    pair = pair.with_log_probs() if options.get("log_probs") else pair
    return pair, {name: value for name, value in options.items() if name in asks}


def _run(pair: Pair, state: DecodeState, stop: Sequence[str]) -> DecodeState:
    """Decodes to the end: in one dispatch, or with stop strings in dispatches of a few rounds."""
    if not stop:
        return pair.decoder.run(pair.params, state)
    while not np.all(on_host(state.done)):
        state = pair.decoder.run(pair.params, state, rounds=STOP_STRING_ROUNDS)
        state = end_at_stops(pair, state, [stop] * len(state.length))
    return state


def end_at_stops(pair: Pair, state: DecodeState, stops: Sequence[Sequence[str]]) -> DecodeState:
    """The state with the rows done whose text holds one of the row's stop strings."""
    tokens, begin, end, done = on_host((state.tokens, state.prompt_length, state.length, state.done))
    done = done.copy()
    for row, stop in enumerate(stops):
        if stop and not done[row]:
            text = pair.target.tokenizer.decode(tokens[row, begin[row] : end[row]].tolist())
            done[row] = find_stop(text, stop) is not None
    return state._replace(done=placed(done))
