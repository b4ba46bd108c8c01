"""One compilation for every number, states donated and never copied, nothing to the host inside a generation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import carried_shapes
from jax import export
from jax.sharding import NamedSharding, PartitionSpec
from tiny_llama import model_and_params

from specdec_jax import ModelParams, build_decoder, kernels, make_warp
from specdec_jax.contrib.trees import comb
from specdec_jax.decoding.state import slots_for
from specdec_jax.drafters import model
from specdec_jax.models import llama
from specdec_jax.stopping import adaedl, static
from specdec_jax.text.generation import end_at_stops
from specdec_jax.verification import block, rejection


def tiny_pair(policy, verifier, most=3, dtype=jnp.float32, head_dim=8, **options):
    config = dataclasses.replace(llama.example_config(), head_dim=head_dim)
    tiny, params = model_and_params(config, dtype)
    return build_decoder(tiny, model(tiny, most, catch_up=4), policy, verifier, **options), ModelParams(params, params)


def test_a_sweep_over_every_number_compiles_once():
    decoder, params = tiny_pair(adaedl(), block())
    before = decoder.num_programs("prefill")  # which decoders of other tests share
    sweep = [
        {},
        {"policy_hyperparameters": {"entropy_factor": 0.5}},
        {"policy_hyperparameters": {"threshold": 0.1, "target_acceptance": 0.5, "step": 0.1}},
        {"policy_hyperparameters": {"acceptance_decay": 0.9, "threshold_decay": 0.1, "initial_acceptance": 0.2}},
        {"policy_hyperparameters": {"threshold": [0.1, 0.9]}},
        {"warp": make_warp(2, 0.7)},
        {"warp": make_warp(2, [0.0, 1.3], top_k=5, top_p=0.9, min_p=0.05)},
        {"seed": 5},
        {"seed": [7, 9]},
        {"stop_ids": (3, 4, 5)},
        {"max_new_tokens": 3},
        {"max_new_tokens": [9, 2]},
    ]
    for options in sweep:
        state = decoder.prefill(params, [[1, 2, 3], [4]], **{"max_new_tokens": 8, **options})
        decoder.run(params, state)
    state = decoder.prefill(params, [list(range(1, 30)), [4, 5]], max_new_tokens=8)  # other lengths, the same bucket
    decoder.run(params, decoder.run(params, state, rounds=1), rounds=3)
    assert decoder.num_programs("run") == 1 and decoder.num_programs("prefill") <= before + 1


@pytest.mark.parametrize("commit", [False, True, "mesh"])
def test_programs_compiled_in_advance_are_those_that_run(commit):
    """Also with parameters on a device, as Orbax's are, or a mesh of one, as tunix's, and after a search for stops."""
    decoder, params = tiny_pair(adaedl(), rejection())
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
    last = [NamedSharding(mesh, PartitionSpec(*[None] * rank, "tp")) for rank in range(3)]
    where = jax.tree.map(lambda leaf: last[leaf.ndim - 1], params) if commit == "mesh" else jax.devices()[0]
    params = jax.device_put(params, where) if commit else params
    decoder.compile(params, [[1, 2, 3]], max_new_tokens=8)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiled.append(event))
    state = decoder.run(params, decoder.prefill(params, [[1, 2, 3]], max_new_tokens=8), rounds=1)
    jax.block_until_ready(decoder.run(params, end_at_stops(None, state, [[]])))  # type: ignore[arg-type]
    assert not [event for event in compiled if "compile" in event]


def test_buckets_are_few_and_hold_what_they_must():
    buckets = {slots_for(prompt, 64, 8) for prompt in range(1, 4000)}
    assert len(buckets) < 14
    assert all(slots_for(prompt, 64, 8) >= prompt + 72 for prompt in range(1, 4000))


def program_of_layers(count):
    """(StableHLO, optimised HLO) of a prefill of so many layers."""
    config = dataclasses.replace(llama.example_config(), num_hidden_layers=count)
    tiny, params = model_and_params(config)
    decoder = build_decoder(tiny, model(tiny, 3, catch_up=4), static(), rejection())
    lowered = decoder.jitted["prefill"].lower(params, None, np.zeros((1, 64), np.int32), np.full(1, 3, np.int32))
    return lowered.as_text(), lowered.compile().as_text()


@pytest.mark.optimised
def test_layers_are_traced_once_and_share_what_is_alike():
    """One function lowered for all but the last, whose output no prefill reads; one cosine, no concatenation each."""
    few, many = program_of_layers(2), program_of_layers(5)
    functions = [program[0].count("func.func private @_traced_block") for program in (few, many)]
    assert functions == ([2, 2] if jax.__version_info__ >= (0, 11) else [1, 1])  # 0.10 lowers the last as the others
    if jax.__version_info__ < (0, 11):
        pytest.xfail("XLA of jax 0.10 (Python 3.11) computes the cosine again for every layer")
    assert many[1].count(" cosine(") == few[1].count(" cosine(") > 0
    assert many[1].count(" concatenate(") == few[1].count(" concatenate(")


def test_decoders_of_one_target_share_what_reads_the_prompt():
    """Also decoders of checkpoints that were read one by one, if their configurations are equal."""
    decoders = []
    for policy in (adaedl(), static()):
        tiny = llama.language_model(llama.example_config(), jnp.float32)
        decoders.append(build_decoder(tiny, model(tiny, 3), policy, rejection()))
    for name in ("prefill", "prefill_drafter"):
        assert decoders[0].jitted[name] is decoders[1].jitted[name]


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["run", "step"])
def test_a_state_is_donated(name):
    decoder, params = tiny_pair(adaedl(), rejection())
    state = decoder.prefill(params, [[1, 2, 3]], max_new_tokens=8)
    after = getattr(decoder, name)(params, state)
    for before in (*state.target_cache.keys, *state.drafter.cache.values, state.tokens):
        assert before.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, params)))


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("policy", [adaedl(), comb()])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_generation_copies_no_cache(policy, dtype):
    """Rounds, the switch over widths and the draft loop all write in place, and a comb moves one slot a sibling.

    Heads are wide: the cache dwarfs scores.
    """
    if jax.__version_info__ < (0, 11):
        pytest.xfail("XLA of jax 0.10 (Python 3.11) keeps one copy of the caches: docs/performance.md")
    decoder, params = tiny_pair(policy, rejection(), dtype=dtype, head_dim=128)
    state = jax.eval_shape(lambda: decoder.prefill(params, [[1, 2, 3]], max_new_tokens=8, slots=8192))
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in (*state.target_cache.keys, *state.target_cache.values))
    memory = decoder.jitted["run"].lower(params, state, np.int32(1), np.int32(1)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.4 * cache
    assert memory.alias_size_in_bytes > 0.95 * memory.output_size_in_bytes


@pytest.mark.parametrize("policy", [adaedl(), comb()])
def test_the_distributions_of_drafts_are_written_into_one_buffer(policy):
    """[B, K, V] is filled once a run and not once a round, which takes as long as a draft."""
    decoder, params = tiny_pair(policy, rejection())
    state = decoder.prefill(params, [[1, 2, 3]], max_new_tokens=8)
    assert (1, 3, decoder.parts.target.spec.vocab_size) in carried_shapes(decoder, params, state)


def test_nothing_is_transferred_inside_a_generation():
    decoder, params = tiny_pair(adaedl(), rejection())
    state = decoder.prefill(params, [[1, 2, 3]], max_new_tokens=8)
    rounds, leave = jax.device_put((np.int32(100), np.int32(1)))
    decoder.jitted["run"](params, decoder.prefill(params, [[1, 2]], max_new_tokens=8), rounds, leave)  # compiled before
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(decoder.jitted["run"](params, state, rounds, leave))
    assert int(state.statistics.num_emitted_tokens[0]) == 8


def test_compiler_options_reach_every_program():
    """An option that no compiler knows is refused by each."""
    decoder, params = tiny_pair(static(), rejection())
    refused, _ = tiny_pair(static(), rejection(), compiler_options={"xla_no_such_option": "1"})
    state = decoder.prefill(params, [[1, 2]], max_new_tokens=2)
    most = {"max_new_tokens": 2}
    for call in (
        lambda: refused.prefill(params, [[1, 2]], **most),
        lambda: refused.run(params, state),
        lambda: refused.step(params, state),
        lambda: refused.extend(params, state, [[1, 2, 3]], **most),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            call()


PLATFORMS = ("tpu", "cuda", "cpu")


def test_lowers_for_every_platform_without_callbacks_and_float64():
    """A run: a loop over rounds, with the program of one inside."""
    tiny, params = model_and_params(dtype=jnp.bfloat16)
    decoder = build_decoder(tiny, model(tiny, 3), adaedl(), block())
    weights = ModelParams(params, params)
    state = decoder.prefill(weights, [[1, 2, 3]], max_new_tokens=8, warp=make_warp(1, 0.8, 5, 0.9, 0.01))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in kernels.TARGETS]  # of the CPU's program
    lower = export.export(decoder.jitted["run"], platforms=PLATFORMS, disabled_checks=checks)
    program = lower(weights, state, np.int32(4), np.int32(1))
    text = str(program.mlir_module())
    assert program.platforms == PLATFORMS
    assert "stablehlo.while" in text and "xf32>" in text
    calls = set(re.findall(r"custom_call @(\w+)", text))
    assert not [call for call in calls if "callback" in call or "python" in call.lower()], calls
    assert "outfeed" not in text and "infeed" not in text
    assert not re.search(r"\bf64\b|xf64", text)
