"""On CUDA all of a generation is told to be one graph, elsewhere nothing is."""

import jax
import pytest
import tiny_llama

from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.decoder import _wrap
from specdec_jax.decoding.one_graph import CAPTURED, FLAG, compiler_options
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters import model
from specdec_jax.stopping import static
from specdec_jax.verification import rejection


def tiny_decoder(**options):
    target, params = tiny_llama.model_and_params()
    return build_decoder(target, model(target, 2), static(), rejection(), **options), ModelParams(params, params)


@pytest.mark.parametrize(
    ("platform", "version", "flags", "captured"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "", True),
        ("gpu", "cuda 13000", "--xla_gpu_autotune_level=0", True),
        ("gpu", "cuda 12020", "", False),  # no conditional nodes yet
        ("gpu", "rocm 60300", "", False),
        ("gpu", "unknown", "", False),
        ("tpu", "cuda 12090", "", False),
        ("cpu", "cpu", "", False),
        ("gpu", "cuda 12090", "--xla_gpu_enable_command_buffer=", False),  # the user's own choice
    ],
)
def test_loops_are_captured_where_cuda_can(platform, version, flags, captured):
    assert compiler_options(platform, version, flags) == ({FLAG: CAPTURED} if captured else {})
    assert "WHILE" in CAPTURED and "CONDITIONAL" in CAPTURED


def test_a_failure_of_a_captured_generation_says_how_to_decode_without():
    decoder, params = tiny_decoder()
    state = decoder.prefill(params, [[1, 2]], max_new_tokens=2)

    def fail(*_):
        raise jax.errors.JaxRuntimeError("cuGraphInstantiate failed")

    with pytest.raises(RuntimeError, match=rf"XLA_FLAGS=--{FLAG}= decodes without .* cuGraphInstantiate failed"):
        _wrap(decoder.parts, {"run": fail, "step": fail}, captured=True).run(params, state)
    with pytest.raises(jax.errors.JaxRuntimeError, match="^cuGraphInstantiate failed"):
        _wrap(decoder.parts, {"run": fail, "step": fail}, captured=False).run(params, state)


@pytest.mark.parametrize("name", ["prefill", "run", "step", "extend", "score"])
def test_what_the_compiler_is_told_reaches_every_program(name):
    """An option that no compiler knows is refused by each."""
    decoder, params = tiny_decoder()
    state = decoder.prefill(params, [[1, 2]], max_new_tokens=2)
    told, _ = tiny_decoder(compiler_options={"xla_no_such_option": "1"})
    calls = {
        "prefill": lambda: told.prefill(params, [[1, 2]], max_new_tokens=2),
        "run": lambda: told.run(params, state),
        "step": lambda: told.step(params, state),
        "extend": lambda: told.extend(params, state, [[1, 2, 3]], max_new_tokens=2),
        "score": lambda: told.score(params, [[1, 2, 3]]),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        calls[name]()
