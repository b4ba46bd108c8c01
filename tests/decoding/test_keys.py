"""The key of a request's uniforms: its seed, and a hash of what it reads."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specdec_jax import lossless
from specdec_jax.decoding.sampling import make_warp, policy_seeds, prompt_hashes, uniforms
from specdec_jax.stopping import static
from specdec_jax.verification import rejection

ROWS, VOCAB, PROMPT = 1024, 3, [0, 1]


def test_hashes_stay_what_they_are():
    """Every text at a seed depends on them."""
    hashes = [459728077, 459728077, 615005626]
    assert prompt_hashes([[0, 1], [0, 1], [1, 0]]).tolist() == hashes
    assert jax.jit(prompt_hashes)([jnp.array(prompt) for prompt in ([0, 1], [0, 1], [1, 0])]).tolist() == hashes
    assert len(set(prompt_hashes([[0] * length for length in range(1, 300)]).tolist())) == 299
    assert prompt_hashes([[0]], [[1]]) != prompt_hashes([[0, 1]])  # a source counts, and is no part of the prompt


def test_a_seed_alone_stands_for_the_key_with_0():
    seeds, zero = np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32)
    emitted = np.arange(4, dtype=np.int32)
    keys = np.stack([zero, seeds], axis=1)
    np.testing.assert_array_equal(uniforms(keys, emitted, 2, 1), uniforms(seeds, emitted, 2, 1))
    np.testing.assert_array_equal(policy_seeds(keys), policy_seeds(seeds))
    hashed = np.stack([prompt_hashes([PROMPT] * 4), seeds], axis=1)
    assert not np.any(np.asarray(uniforms(hashed, emitted, 2, 1)) == np.asarray(uniforms(seeds, emitted, 2, 1)))
    assert not np.any(np.asarray(policy_seeds(hashed)) == np.asarray(policy_seeds(seeds)))


def test_the_turns_of_a_conversation_are_independent():
    """The same question twice at one seed: over seeds, the first tokens of both answers have the joint distribution."""
    decoder, params = lossless.toy_decoder(static(), rejection())
    more = {"seed": 0, "warp": make_warp(ROWS, temperature=1.0), "stop_ids": (), "slots": 64}
    state = decoder.run(params, decoder.prefill(params, [PROMPT] * ROWS, max_new_tokens=3, **more))
    first = np.asarray(state.tokens)[:, 2]
    asked_again = [[*text, *PROMPT] for text in np.asarray(state.tokens)[:, :5].tolist()]
    state = decoder.run(params, decoder.extend(params, state, asked_again, max_new_tokens=3, **more))
    second = np.asarray(state.tokens)[:, 7]
    logits = np.asarray(params.target, np.float64)[0, 1]
    answer = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    expected = ROWS * np.outer(answer, answer).ravel()
    observed = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert 0.2 < np.mean(first == second) < 0.8
