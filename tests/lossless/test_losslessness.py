"""The output distribution is the target's: by enumeration, by chi-square of the whole decoder; wrong rules are seen."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_once, with_drafted
from enumerated import WARPS, distance
from rules import FAST, restless

from specdec_jax import ModelParams, lossless, make_warp
from specdec_jax.decoding import sampling
from specdec_jax.decoding.rounds import open_round
from specdec_jax.lossless import enumeration
from specdec_jax.lossless.enumeration import CHOSEN, DRAWN, Requests, setting_of
from specdec_jax.lossless.toys import FADES, toy_pair, with_reading
from specdec_jax.stopping import adaedl, at_least, hf_heuristic, policy_bandit, static, survival
from specdec_jax.verification import block, greedy, rejection

POLICIES = {  # every rule, called without arguments, is enumerated in test_contracts
    "static": static(draft_length=2),
    "adaedl_keep": adaedl(keep_checked_token=True, **FAST),
    "restless": restless(),
    "thompson": policy_bandit((adaedl(keep_checked_token=True), hf_heuristic()), "thompson"),
}
VERIFIERS = {"rejection": rejection(), "block": block(), "greedy": greedy()}


@pytest.mark.often(9)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_output_distribution_is_exactly_the_targets(policy, verifier):
    assert distance(POLICIES[policy], VERIFIERS[verifier], kinds=(DRAWN, CHOSEN)) < 1e-12


@pytest.mark.parametrize(
    "weights", [[0.2, 0.5, 0.3], [0.0, 2.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.6, -0.2, 0.1], [-0.3, 0.2, -0.1]]
)
def test_the_distribution_of_a_draw_is_that_of_the_real_draw(weights):
    uniform = (np.arange(20_000) + 0.5) / 20_000
    rows = jnp.tile(jnp.array(weights, jnp.float32), (20_000, 1))
    drawn = np.asarray(jax.jit(sampling.draw)(rows, jnp.asarray(uniform, jnp.float32)))
    frequencies = np.bincount(drawn, minlength=3) / 20_000
    np.testing.assert_allclose(enumeration.drawn_distribution(np.array([weights]))[0], frequencies, atol=2e-4)


# What must fail the proof


def test_a_residual_without_the_clamp_fails(monkeypatch):
    module = importlib.import_module("specdec_jax.verification.rejection")
    monkeypatch.setattr(module, "residual", lambda log_p, log_q: jnp.exp(log_p) - jnp.exp(log_q))
    patched = rejection().replace(lossless=True)  # equal to no rejection() that was compiled before
    assert distance(static(), patched, toys=[toy_pair(3, n) for n in range(4)]) > 0.01


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_q_of_another_temperature_fails(verifier):
    honest = VERIFIERS[verifier]

    def verify(state, draft, distributions, context):
        other = draft._replace(log_q=jax.nn.log_softmax(draft.log_q / 1.25))
        return honest.verify(state, other, distributions, context)

    wrong = honest.replace(verify=verify)
    assert distance(static(), wrong, WARPS[:1]) > 0.001


# The whole decoder


SAMPLED = {
    "adaedl_keep-block": (adaedl(keep_checked_token=True, **FAST), block(), {"temperature": 0.8}),
    "survival_together-rejection": (survival(together=True, drafter_cost=0.3), rejection(), {"temperature": 1.0}),
    "reading, at_least-rejection": (at_least(2, adaedl()), rejection(), {"temperature": 0.7}),
    "reading, survival-block": (survival(), block(), {"temperature": 1.0}),
    "restless-rejection": (restless(3), rejection(), {"temperature": 1.0}),
    "restless-block": (restless(3), block(), {"temperature": 1.5, "top_p": 0.97}),
}


def sampled(name, sequences=40_960):
    policy, verifier, warp = SAMPLED[name]
    decoder, params = lossless.toy_decoder(policy, verifier, 3, toy=1, reads=name.startswith("reading"))
    return lossless.test_by_sampling(decoder, params, warp=warp, sequences=sequences)


@pytest.mark.often(3)
@pytest.mark.optimised
@pytest.mark.parametrize("name", SAMPLED)
def test_the_whole_decoder_draws_from_the_targets_distribution(name):
    report = sampled(name)
    assert report.sequences >= 40_000 and report.degrees >= 20
    assert report.p_value > 1e-3 and report.lossless
    assert report.drafted[1] > 500  # of which a second one has read the drafter's own state, where it reads


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("name", ["restless-rejection", "restless-block"])
def test_uniforms_keyed_on_the_position_alone_fail(monkeypatch, name):
    def by_position(seed, emitted, positions):
        index = emitted[:, None] * 3 + jnp.arange(positions * 3, dtype=jnp.int32)[None]
        return sampling._uniforms(seed, jnp.zeros_like(emitted), index).reshape(-1, positions, 3)

    monkeypatch.setattr("specdec_jax.decoding.rounds.round_uniforms", by_position)
    report = sampled(name, 8192)  # p is 2e-22
    assert report.statistic > 2 * report.degrees and report.p_value < 1e-12 and not report.lossless


def test_a_drafter_that_drops_a_drawn_token_fails():
    def shorter(drafted):
        last = jnp.maximum(drafted.length - 1, 0)
        token = jnp.take_along_axis(drafted.tokens, last[:, None], axis=1)
        log_q = jnp.take_along_axis(drafted.log_q, last[:, None, None], axis=1)[:, 0]
        unlikely = jnp.take_along_axis(log_q, token, axis=1)[:, 0] < jnp.log(1 / 3)
        return drafted._replace(length=drafted.length - (unlikely & (drafted.length > 0)).astype(jnp.int32))

    decoder, params = lossless.toy_decoder(static(), rejection(), 2, toy=1)
    assert lossless.test_by_sampling(with_drafted(decoder, shorter), params, sequences=4096).p_value < 1e-12  # 1e-33


@pytest.mark.optimised
def test_the_sampled_test_bins_what_it_cannot_list():
    """A vocabulary larger than the tree's branching: prefixes and the rest of each, still a partition."""
    decoder, params = lossless.toy_decoder(static(), rejection(), vocab_size=12)
    report = lossless.test_by_sampling(decoder, params, tokens=2, sequences=8192, branching=3)
    assert report.cells == 3 * 3 + 3 + 1 and report.lossless
    other = ModelParams(params.target * 1.2, params.drafter)
    wrong = decoder._replace(
        prefill=lambda params, *prompts, **options: decoder.prefill(other, *prompts, **options),
        run=lambda params, state: decoder.run(other, state),
    )
    assert not lossless.test_by_sampling(wrong, params, tokens=2, sequences=8192, branching=3).lossless


def test_hidden_states_of_a_position_that_is_not_verified_are_rejected():
    """The control's distributions are as if each draft had read the draft's own position."""
    decoder, params = lossless.toy_decoder(static(draft_length=2), rejection(), 2, reads=True)
    read = jnp.asarray(params.drafter.read)

    def leaked(drafted):
        seen = jax.nn.one_hot(drafted.tokens, read.shape[0]) @ read
        return drafted._replace(log_q=jax.nn.log_softmax(drafted.log_q + seen))

    assert not lossless.test_by_sampling(with_drafted(decoder, leaked), params, tokens=4, sequences=4096).lossless


def drafter_table(toy):
    requests = Requests(jax.tree.map(np.asarray, make_warp(1, 1.0)), *np.zeros((5, 1), np.int32))
    return setting_of(None, rejection(), None, 2, requests, [toy], tokens=2, batch=1).drafter_distributions.log_prob


def test_what_is_enumerated_is_what_the_decoder_drafts_from():
    """The table of the enumeration against the decoder's own log_q: first draft and second, whatever was read."""
    toy = with_reading(toy_pair(3, 0), 0)
    table = drafter_table(toy).reshape(2, 3, 3, 3, 3)
    decoder, params = lossless.toy_decoder(static(draft_length=2), rejection(), 2, reads=True)
    before, last = np.array([*np.ndindex(3, 3)]).T
    state = decoder.prefill(params, [*np.ndindex(3, 3)], max_new_tokens=8, warp=make_warp(9, 1.0))
    context, half = open_round(decoder.parts, params, state).context, jnp.full((2, 9), 0.5)
    given = params.drafter, state.drafter, state.tokens, context, decoder.parts.policy, state.policy
    draft, *_ = draft_once(decoder.parts.drafter, *given, uniforms=half, vocab=3)
    np.testing.assert_allclose(draft.log_q[:, 0], table[0, before, before, last], atol=1e-5)
    np.testing.assert_allclose(draft.log_q[:, 1], table[1, before, last, draft.tokens[:, 0]], atol=1e-5)


def test_a_toy_that_reads_drafts_from_other_distributions_than_one_that_does_not():
    """Else the enumeration of reading toys would prove nothing new."""
    plain, toy = toy_pair(3, 1), with_reading(toy_pair(3, 1))
    with_reads = drafter_table(toy).reshape(2, 3, 9, 3)
    without = drafter_table(plain)
    assert np.abs(with_reads[0] - without[None]).max() > 1 and FADES * np.abs(toy.read).max() > 0.5
    assert np.abs(with_reads[0] - with_reads[1]).max() > 0.3
