"""`jax.export` lowers the compiled functions for TPU, CUDA and CPU from any machine: a loop whose end depends on the
drafter's entropy, no call back to Python, nothing in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from specdec_jax import kernels
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters import model
from specdec_jax.models import llama
from specdec_jax.stopping import adaedl
from specdec_jax.verification import block

PLATFORMS = ("tpu", "cuda", "cpu")


@pytest.fixture(scope="module")
def exported():
    """Both programs, lowered once: name -> (Exported, the text of its module)."""
    config = llama.example_config()
    tiny = llama.language_model(config, jnp.bfloat16)
    params = llama.init_params(config, jax.random.key(0), jnp.bfloat16)
    decoder = build_decoder(tiny, model(tiny, 3), adaedl(), block())
    weights = ModelParams(params, params)
    state = decoder.prefill(weights, [[1, 2, 3]], max_new_tokens=8, warp=make_warp(1, 0.8, 5, 0.9, 0.01))
    arguments = {"run": (weights, state, np.int32(4), np.int32(1)), "step": (weights, state)}
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in kernels.TARGETS]  # of the CPU's program
    lowered = {
        name: export.export(decoder.jitted[name], platforms=PLATFORMS, disabled_checks=checks)(*given)
        for name, given in arguments.items()
    }
    return {name: (program, str(program.mlir_module())) for name, program in lowered.items()}


@pytest.mark.parametrize("name", ["run", "step"])
def test_lowers_for_every_platform_without_callbacks_and_float64(exported, name):
    program, text = exported[name]
    assert program.platforms == PLATFORMS
    assert "stablehlo.while" in text and "xf32>" in text
    calls = set(re.findall(r"custom_call @(\w+)", text))
    assert not [call for call in calls if "callback" in call or "python" in call.lower()], calls
    assert "outfeed" not in text and "infeed" not in text
    assert not re.search(r"\bf64\b|xf64", text)


def test_the_draft_loop_ends_by_the_entropy():
    """With the entropy factor traced, another value changes how many passes the same program makes."""
    config = llama.example_config()
    tiny = llama.language_model(config, jnp.float32)
    params = llama.init_params(config, jax.random.key(0), jnp.float32)
    decoder = build_decoder(tiny, model(tiny, 3), adaedl(), block())
    weights = ModelParams(params, params)
    passes = {}
    for factor in (1e-6, 0.9):
        state = decoder.prefill(
            weights, [[1, 2, 3]], max_new_tokens=8, policy_hyperparameters={"entropy_factor": factor}
        )
        state = decoder.step(weights, state)
        passes[factor] = int(state.statistics.drafter_passes[0])
    assert passes == {1e-6: 3, 0.9: 1}
    assert decoder.num_programs("step") == 1


def test_run_is_a_loop_of_rounds_around_a_loop_of_passes(exported):
    _, run = exported["run"]
    _, step = exported["step"]
    assert run.count("stablehlo.while") > step.count("stablehlo.while") >= 1
