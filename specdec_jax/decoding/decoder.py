"""build_decoder: prefill, extend, refill, step and run. The only file that donates buffers.

One dispatch decodes to the last token (`run`), or a given number of rounds (`run(..., rounds=n)`, `step`), or until
some rows are finished and can be replaced by new requests (`run(..., leave=k)`, `refill`). States are donated, so a
state that was passed in must not be used again; parameters are arguments, never donated and never closed over.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.decoding.prefill import counted, drafter_prefill, fill, fill_drafter, target_prefill
from specdec_jax.decoding.rounds import ModelParams, Parts, Run, decode_round, with_buffer
from specdec_jax.decoding.state import fresh_state, refuse_encoder
from specdec_jax.ranges import Between
from specdec_jax.sharding import by_rows, committed, mesh_here, placed
from specdec_jax.strategy import named_call
from specdec_jax.types import Array, DecodeState, Drafter, LanguageModel, Monitor, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection


class LossyVerification(UserWarning):
    """A decoder was built whose output distribution is not the target's. Issued once per process for each verifier."""


_warned: set[str] = set()  # names of verifiers that were warned about


class Decoder(NamedTuple):
    """The result of build_decoder. `jitted` has the jitted functions, for lowering, exporting and cost analysis."""

    prefill: Callable[..., DecodeState]  # (params, prompts, n=1, **options of `fresh_state`): n rows of each prompt
    # arguments of prefill but n: compiles it and, without a mesh, `run`; returns what prefills this request, once
    compile: Callable[..., Callable[[], DecodeState]]
    extend: Callable[..., DecodeState]  # (params, state, prompts, **options): keeps caches of the common prefix
    idle: Callable[..., DecodeState]  # (params, rows, slots, **options of one row): a state of finished rows
    refill: Callable[..., DecodeState]  # (params, state, row, prompt, **options): replaces the row by a new request
    step: Callable[[ModelParams, DecodeState], DecodeState]  # one round
    run: Callable[..., DecodeState]  # rounds=n: at most n rounds; leave=k: until k rows are finished
    parts: Parts
    jitted: Mapping[str, Any]

    def num_programs(self, *names: str) -> int:
        """Number of programs traced so far for these functions: prefill, prefill_drafter, extend, run or step."""
        return sum(self.jitted[name].__wrapped__.programs for name in names)


def no_monitor() -> Monitor:
    """A monitor without state."""
    return Monitor(lambda batch: (), lambda state, logits, result, context: state)


def default_widths(max_draft_length: int) -> tuple[int, ...]:
    """Verification widths for drafts of at most `max_draft_length` tokens: powers of two from 2, then the full width.

    Plain decoding has width 1. In float32 on a CPU that takes half the time of width 2; in bfloat16 they cost the same.
    """
    full = max_draft_length + 1
    return (*(2**n for n in range(1, 31) if 2**n < full), full)


def build_decoder(
    target: LanguageModel,
    drafter: Drafter,
    policy: StoppingPolicy,
    verifier: Verifier = rejection(),
    *,
    monitor: Monitor | None = None,
    verification_widths: Sequence[int] | None = None,
    prefill_chunk: int = 64,
    compiler_options: Mapping[str, Any] | None = None,
) -> Decoder:
    """Builds a decoder for one target, drafter, policy and verifier, whose programs are compiled once.

    A lossy verifier causes a `LossyVerification` warning, once per process.

    Args:
        verification_widths: ascending widths of verification passes; a round uses the narrowest that holds the batch's
            longest draft. With a single width a row's float32 arithmetic is independent of the other rows. None:
            `default_widths`.
        prefill_chunk: prompt tokens per target pass.
        compiler_options: passed to `jax.jit`.

    Raises:
        ValueError: widths that do not ascend or cannot hold the longest draft, a max_draft_length that is not below the
            target's context, prefill_chunk below 2, different vocabularies, hidden states or an encoder that the
            drafter needs and the target lacks, or a policy or verifier that needs phases without a monitor of them.
    """
    widths = tuple(verification_widths or default_widths(policy.max_tokens(drafter.max_draft_length)))
    if list(widths) != sorted(set(widths)) or widths[0] < 1:
        raise ValueError(f"verification_widths must ascend and be positive, got {widths}")
    if widths[-1] < drafter.max_draft_length + 1:
        raise ValueError(
            f"the widest verification width {widths[-1]} cannot hold max_draft_length {drafter.max_draft_length} "
            f"drafts and the token before them; give one of at least {drafter.max_draft_length + 1}"
        )
    if drafter.max_draft_length >= target.spec.context:
        raise ValueError(
            f"max_draft_length {drafter.max_draft_length} does not fit the target's context of {target.spec.context}"
        )
    check_reads(target, drafter.observe)
    Between(2, whole=True).check("prefill_chunk", prefill_chunk)
    drafts = target.spec.vocab_size if drafter.model is None else drafter.model.spec.vocab_size
    if drafter.model is not None and drafter.model.spec.source is not None and target.spec.source is None:
        raise ValueError("the drafter has an encoder, and the target, which has none, brings it no source")
    if drafts != target.spec.vocab_size:
        raise ValueError(
            f"drafter and target must share a vocabulary: {drafts} against {target.spec.vocab_size} entries"
        )
    run_round = decode_round if policy.tree_hooks is None else policy.tree_hooks.round_of(target, drafter, policy)
    parts = Parts(target, drafter, policy, verifier, monitor or no_monitor(), widths)
    for kind, part in (("policy", policy), ("verifier", verifier)):
        if part.needs_phases and not (monitor and hasattr(monitor.init(1), "phase")):
            raise ValueError(f"this {kind} reads phases: give a monitor that watches them, monitors.phases()")
    if not verifier.lossless and verifier.name not in _warned:  # once per factory name, whatever the hyperparameters
        _warned.add(verifier.name)
        differs = "the distribution of the output is not the target's (docs/losslessness.md)"
        warnings.warn(f"{verifier.name} verification is lossy: {differs}", LossyVerification, stacklevel=2)

    def run_rounds(params: ModelParams, state: DecodeState, rounds: Array, leave: Array) -> DecodeState:
        def unfinished(carry: tuple[Array, Run]) -> Array:
            num_rounds, run = carry
            return (num_rounds < rounds) & (jnp.sum(run.state.done.astype(jnp.int32)) < leave)

        drafter_params = params.drafter if drafter.model is None else drafter.model.hidden.prepared(params.drafter)
        params = ModelParams(target.hidden.prepared(params.target), drafter_params)
        one_more = lambda carry: (carry[0] + 1, run_round(parts, params, carry[1]))  # noqa: E731
        _, run = lax.while_loop(unfinished, one_more, (jnp.int32(0), with_buffer(parts, params, state)))
        return by_rows(run.state)

    def one_round(params: ModelParams, state: DecodeState) -> DecodeState:
        return by_rows(run_round(parts, params, with_buffer(parts, params, state)).state)

    def continue_from(params: ModelParams, state: DecodeState, fresh: DecodeState) -> DecodeState:
        slot = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
        equal = (state.tokens == fresh.tokens) & (slot < jnp.minimum(state.length, fresh.length)[:, None])
        same = jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1)  # [B], leading tokens that both have
        drafter_state = drafter.commit(params.drafter, state.drafter, state.tokens, same)
        shared = target.with_length(state.target_cache, jnp.minimum(same, state.length - 1))  # without the last token
        cache, reads = fill(
            target, drafter.observe, params.target, params.drafter, fresh.tokens, fresh.length, shared, prefill_chunk
        )
        drafter_state = fill_drafter(
            drafter, params.drafter, drafter_state, fresh.tokens, reads, shared.length, fresh.length
        )
        return by_rows(fresh._replace(target_cache=cache, drafter=drafter_state))

    def repeat(tree: Any, n: int) -> Any:
        return by_rows(jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=0), tree))

    def place(state: DecodeState, fresh: DecodeState, row: Array) -> DecodeState:
        return by_rows(jax.tree.map(lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, row, 0), state, fresh))

    options = dict(compiler_options or {})
    jit = partial(jax.jit, compiler_options=options or None)
    jitted = {
        "run": jit(counted(run_rounds), donate_argnums=1),
        "step": jit(counted(one_round), donate_argnums=1),
        "prefill": target_prefill(target, drafter.observe, prefill_chunk, tuple(options.items())),
        "prefill_drafter": drafter_prefill(drafter, tuple(options.items())),
        "extend": jit(counted(continue_from), donate_argnums=1),
        "repeat": jit(repeat, static_argnums=1),
        "place": jit(place, donate_argnums=0),
    }
    return _wrap(parts, jitted)


def _wrap(parts: Parts, jitted: Mapping[str, Any]) -> Decoder:
    """The Decoder around the jitted functions; arguments are checked here, before compilation."""

    compiled = set()  # shapes that were compiled in advance

    def begin(
        params: ModelParams, prompts: Sequence[Sequence[int]], n: int, options: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        Between(1, whole=True).check("n", n)
        state, source = fresh_state(parts, prompts, n, **options)
        text = state.tokens[::n], state.length[::n]  # one row of each prompt
        # copies: `run` donates them, and a policy may still hold the originals
        return *placed((state, text, source), committed(params)), params.drafter if parts.drafter.layers else None

    def prefill(params: ModelParams, prompts: Sequence[Sequence[int]], *, n: int = 1, **options: Any) -> DecodeState:
        return filled(params, n, *begin(params, prompts, n, options))

    def filled(params: ModelParams, n: int, state: DecodeState, text: Any, source: Any, reader: Any) -> DecodeState:
        cache, reads = jitted["prefill"](params.target, reader, *text, source)
        caches = cache, jitted["prefill_drafter"](params.drafter, *text, reads, source)
        cache, drafter = caches if n == 1 else jitted["repeat"](caches, n)
        return state._replace(target_cache=cache, drafter=drafter)

    def compile_all(params: ModelParams, prompts: Sequence[Sequence[int]], **options: Any) -> Callable[[], DecodeState]:
        state, text, source, reader = begin(params, prompts, 1, options)
        filling = partial(filled, params, 1, state, text, source, reader)
        leaves, structure = jax.tree.flatten((params, state, source))
        shapes = structure, *((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if shapes in compiled:
            return filling
        compiled.add(shapes)
        with ThreadPoolExecutor() as pool:  # a program compiles while the next one is traced
            lowered = jitted["prefill"].lower(params.target, reader, *text, source)
            compiling = [pool.submit(lowered.compile)]
            cache, reads = lowered.out_info
            drafter = jitted["prefill_drafter"].lower(params.drafter, *text, reads, source)
            compiling.append(pool.submit(drafter.compile))
            if mesh_here() is None:  # else `run` depends on how the caches are sharded
                ready, where = state._replace(target_cache=cache, drafter=drafter.out_info), committed(params)
                ready = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), ready)
                run = jitted["run"].lower(params, ready, np.int32(0), np.int32(len(prompts)))
                compiling.append(pool.submit(run.compile))
        for program in compiling:
            program.result()
        return filling

    def extend(
        params: ModelParams, state: DecodeState, prompts: Sequence[Sequence[int]], **options: Any
    ) -> DecodeState:
        refuse_encoder(parts.target, "extend, which keeps what was read of the text before,")
        options.setdefault("slots", state.tokens.shape[1])
        fresh, _ = fresh_state(parts, prompts, **options)
        if fresh.tokens.shape != state.tokens.shape:
            raise ValueError(
                f"extend needs the state's own shape {state.tokens.shape} (rows, slots), got {fresh.tokens.shape}"
            )
        return jitted["extend"](params, state, fresh)

    def idle(params: ModelParams, rows: int, slots: int, **options: Any) -> DecodeState:
        source = {"sources": [[0]]} if parts.target.spec.source is not None else {}
        first = prefill(params, [[0]], **{**options, **source, "max_new_tokens": 0, "slots": slots})
        return jitted["repeat"](first, rows)  # on a mesh caches are sharded like those of a prefilled row

    def refill(params: ModelParams, state: DecodeState, row: int, prompt: Sequence[int], **options: Any) -> DecodeState:
        batch, slots = state.tokens.shape
        if not 0 <= row < batch:
            raise ValueError(f"refill needs a row in [0, {batch}), got {row}")
        if state.record is not None:
            raise ValueError("a state that is refilled keeps no record of rounds: begin it with record_rounds=0")
        fresh = prefill(params, [prompt], **{**options, "slots": slots, "record_rounds": 0})
        ends, present = fresh.stop_ids.shape[1], state.stop_ids.shape[1]
        if ends != present:
            raise ValueError(f"this state has room for {present} stop_ids a row, the prompt's take {ends}")
        held, new = (jax.tree.leaves((each.target_cache, each.drafter)) for each in (state, fresh))
        if [leaf.shape[1:] for leaf in held] != [leaf.shape[1:] for leaf in new]:  # its source has another bucket
            raise ValueError(
                "caches of this prompt have other shapes than the state's: give it the state's source_slots"
            )
        return jitted["place"](state, fresh, np.int32(row))

    def run(
        params: ModelParams, state: DecodeState, rounds: int | None = None, leave: int | None = None
    ) -> DecodeState:
        batch = state.tokens.shape[0]
        if leave is not None and leave < 1:
            raise ValueError(f"run leaves when 1 or more rows are done, got {leave}")
        rounds = np.iinfo(np.int32).max if rounds is None else rounds
        return jitted["run"](params, state, np.int32(rounds), np.int32(min(leave or batch, batch)))

    calls = {"prefill": prefill, "compile": compile_all, "extend": extend, "idle": idle, "refill": refill}
    named = {name: named_call(f"Decoder.{name}", call, fresh_state) for name, call in calls.items()}
    return Decoder(**named, step=jitted["step"], run=run, parts=parts, jitted=jitted)
