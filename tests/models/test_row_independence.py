"""Claim: in bfloat16 on a CPU with native kernels, what a pass says of a token does not depend on how many tokens and
rows share it, bit for bit, in every family; so greedy texts equal plain decoding's at every width and batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llama import random_named

import specdec_jax as sd
from specdec_jax import kernels
from specdec_jax.loading.families import family, family_names
from specdec_jax.models.adapters import with_source

pytestmark = [
    pytest.mark.skipif(kernels.path() is None, reason="products are XLA's"),
    pytest.mark.optimised,  # sums in the order that users get
]

TOKENS, SLOTS = 11, 24
FAMILIES = [name for name in family_names() if not hasattr(family(name), "later_input")]  # no reading drafters


def random_model(name):
    module = family(name)
    config = module.example_config()
    model = module.language_model(config, jnp.bfloat16)
    params = module.params_from_named(config, random_named(config), jnp.bfloat16)
    return (model if model.spec.source is None else with_source(model, [1, 2, 3, 4, 5])), params


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_does_not_depend_on_what_shares_its_pass(name):
    model, params = random_model(name)
    tokens = np.random.default_rng(2).integers(0, model.spec.vocab_size, (3, TOKENS)).astype(np.int32)
    apply = jax.jit(model.apply)
    together, _ = apply(params, tokens, model.init_cache(params, 3, SLOTS))
    cache, alone = model.init_cache(params, 1, SLOTS + 9), []  # another length: sums over slots must not see it
    for at in range(TOKENS):
        logits, cache = apply(params, tokens[1:2, at : at + 1], cache)
        alone.append(logits[0, 0])
    assert np.ptp(alone) > 0 and np.isfinite(alone).all()
    np.testing.assert_array_equal(np.stack(alone), together[1])


PROMPTS = "The capital of France is", "def add(a, b):", "1, 2, 3, 4,", "Once upon a time"
GREEDY = sd.SamplingParams(max_new_tokens=32, temperature=0)


@pytest.fixture(scope="module")
def plain_texts(smollm2):
    pair = sd.build_pair(smollm2, None)
    return [sd.generate(prompt, GREEDY, pair=pair).tokens for prompt in PROMPTS]


@pytest.mark.often(1)
@pytest.mark.parametrize("width", [8, 2, 5, 16])
def test_greedy_texts_of_the_built_in_pair_are_plain_decodings(width, smollm2, smollm2_drafter, plain_texts):
    """At every width of verification, alone and in a batch of four rows."""
    policy = sd.stopping.static(draft_length=width - 1)
    pair = sd.build_pair(smollm2, smollm2_drafter, policy=policy, verification_widths=(width,))
    for rows in (1, 4) if width == 8 else (1,):
        found = []
        for first in range(0, len(PROMPTS), rows):
            results = sd.generate(list(PROMPTS[first : first + rows]), GREEDY, pair=pair)
            found += [one.tokens for one in results]
        assert found == plain_texts, rows
