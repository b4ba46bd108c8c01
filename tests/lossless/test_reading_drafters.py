"""Drafters that read their target are lossless, and one that reads positions not yet verified is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_once, with_drafted

from specdec_jax import lossless
from specdec_jax.decoding.rounds import round_context
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.lossless.enumeration import setting_of
from specdec_jax.lossless.nodes import Requests
from specdec_jax.lossless.toys import FADES, toy_pair, with_reading
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.stopping.survival import survival
from specdec_jax.verification import rejection
from specdec_jax.verification.block import block

WARP = {"temperature": 1.0}
MOST = 4


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("verifier", [rejection(), block()], ids=["rejection", "block"])
@pytest.mark.parametrize("rule", [at_least(2, adaedl()), survival()], ids=["adaedl", "survival"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_whole_decoder_draws_from_the_target(rule, verifier, temperature):
    decoder, params = lossless.toy_decoder(rule, verifier, MOST, distance=0.5, reads=True)
    report = lossless.test_by_sampling(
        decoder, params, warp={"temperature": temperature}, tokens=MOST + 1, sequences=16_384
    )
    assert report.lossless and report.drafted[1] > 500  # of which a second one has read the drafter's own state


def leaking(decoder, params):
    """The decoder's drafter, but that its distributions are told as if each draft had read the draft's own position."""
    read = params.drafter.read

    def leaked(drafted):
        seen = jax.nn.one_hot(drafted.tokens, read.shape[0]) @ jnp.asarray(read)
        return drafted._replace(log_q=jax.nn.log_softmax(drafted.log_q + seen))

    return with_drafted(decoder.parts.drafter, leaked)


def test_hidden_states_of_a_position_that_is_not_verified_are_rejected():
    decoder, params = lossless.toy_decoder(static(draft_length=2), rejection(), 2, reads=True)
    parts = decoder.parts
    cheat = lossless.sampled.build_decoder(
        parts.target, leaking(decoder, params), parts.policy, parts.verifier, prefill_chunk=4
    )
    assert lossless.test_by_sampling(decoder, params, tokens=4, sequences=8192).lossless
    assert not lossless.test_by_sampling(cheat, params, tokens=4, sequences=8192).lossless


def drafter_table(toy):
    requests = Requests(jax.tree.map(np.asarray, make_warp(1, 1.0)), *np.zeros((5, 1), np.int32))
    return setting_of(None, rejection(), None, 2, requests, [toy], tokens=2, batch=1).drafter_distributions.log_prob


def test_what_is_enumerated_is_what_the_decoder_drafts_from():
    """The table of the enumeration against the decoder's own log_q: first draft and second, whatever was read."""
    toy = with_reading(toy_pair(3, 0), 0)
    table = drafter_table(toy).reshape(2, 3, 3, 3, 3)
    decoder, params = lossless.toy_decoder(static(draft_length=2), rejection(), 2, reads=True)
    for before, last in np.ndindex(3, 3):
        state = decoder.prefill(params, [[before, last]], max_new_tokens=8, warp=make_warp(1, 1.0))
        context, half = round_context(decoder.parts, state), lambda index: jnp.full((1,), 0.5)
        given = params.drafter, state.drafter, state.tokens, context, decoder.parts.policy, state.policy
        draft, *_ = draft_once(decoder.parts.drafter, *given, uniform=half, vocab=3)
        first = int(draft.tokens[0, 0])
        np.testing.assert_allclose(draft.log_q[0, 0], table[0, before, before, last], atol=1e-5)
        np.testing.assert_allclose(draft.log_q[0, 1], table[1, before, last, first], atol=1e-5)


def test_a_toy_that_reads_drafts_from_other_distributions_than_one_that_does_not():
    """Else the enumeration of reading toys would prove nothing new."""
    plain, toy = toy_pair(3, 1), with_reading(toy_pair(3, 1))
    with_reads = drafter_table(toy).reshape(2, 3, 9, 3)
    without = drafter_table(plain)
    assert np.abs(with_reads[0] - without[None]).max() > 1 and FADES * np.abs(toy.read).max() > 0.5
    assert np.abs(with_reads[0] - with_reads[1]).max() > 0.3
