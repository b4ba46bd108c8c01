"""Compiler options reach every program of a decoder."""

import jax
import pytest
import tiny_llama

from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters import model
from specdec_jax.stopping import static
from specdec_jax.verification import rejection


def tiny_decoder(**options):
    target, params = tiny_llama.model_and_params()
    return build_decoder(target, model(target, 2), static(), rejection(), **options), ModelParams(params, params)


@pytest.mark.parametrize("name", ["prefill", "run", "step", "extend", "score"])
def test_compiler_options_reach_every_program(name):
    """An option that no compiler knows is refused by each."""
    decoder, params = tiny_decoder()
    state = decoder.prefill(params, [[1, 2]], max_new_tokens=2)
    refused, _ = tiny_decoder(compiler_options={"xla_no_such_option": "1"})
    calls = {
        "prefill": lambda: refused.prefill(params, [[1, 2]], max_new_tokens=2),
        "run": lambda: refused.run(params, state),
        "step": lambda: refused.step(params, state),
        "extend": lambda: refused.extend(params, state, [[1, 2, 3]], max_new_tokens=2),
        "score": lambda: refused.score(params, [[1, 2, 3]]),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        calls[name]()
