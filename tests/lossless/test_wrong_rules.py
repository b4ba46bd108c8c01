"""Cheats that the proofs reject, each in few places only, and honest rules beside them that pass."""

import jax.numpy as jnp
import pytest
from wrong_rules import Rounds, by_rounds

from specdec_jax import lossless
from specdec_jax.decoding.sampling import DRAFT, draw, policy_uniforms, uniforms
from specdec_jax.hyperparameters import full
from specdec_jax.stopping import static
from specdec_jax.types import RoundContext
from specdec_jax.verification import rejection
from specdec_jax.verification._common import bonus_or, draft_log_probabilities, token_by_token

MOST = 5
SHAPE = lossless.Shape(vocab_size=8, longest=MOST, batch=4, reads=False, chosen=False)


def enumerated(policy, verifier, **options):
    options = {"rounds": 4, "drafts": 3_000} | options
    return lossless.prove_rounds(policy, verifier, lossless.Drawing(0), SHAPE, **options)


# What a cheat may depend on: (context, index of the draft [B], its token [B] or None, rounds played [B]) -> [B] bool


PLACES = {f"draft {k}": lambda context, index, token, rounds, k=k: index == k - 1 for k in (1, MOST)}
PLACES |= {
    "token 2": lambda context, index, token, rounds: token == 2,
    "row 1": lambda context, index, token, rounds: jnp.arange(index.shape[0], dtype=jnp.int32) == 1,
    "odd rounds": lambda context, index, token, rounds: rounds % 2 == 1,
    "next row": lambda context, index, token, rounds: jnp.roll(context.length, 1) + 1 > context.length,
}
OF_THE_ROW = [name for name in PLACES if name not in ("row 1", "next row")]


# Policies


def policy(where, says_no):
    """Drafts to the end, but says no where it may and `says_no`(distribution, drafted, context, token) is true."""

    def checks(state, distribution, drafted, context):
        known = drawn_token(distribution, drafted, context)
        return ~(where(context, drafted, known, state.played) & says_no(distribution, drafted, context, known))

    return by_rounds(checks, lambda state, context: jnp.ones_like(context.alive))


def drawn_token(distribution, drafted, context):
    """What the drafter draws if `context.policy_seed` is the request's own seed, and nothing of use if it is not."""
    position = jnp.broadcast_to(drafted, context.length.shape)
    return draw(jnp.exp(distribution.log_prob), uniforms(context.policy_seed, context.emitted, position, DRAFT))


def improbable(distribution, drafted, context, token):
    return jnp.exp(jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)[:, 0]) < 1 / 3


def uncertain(distribution, drafted, context, token):
    return distribution.max_prob < 0.7


def by_chance(distribution, drafted, context, token):
    return policy_uniforms(context, 1)[:, 0] < 0.5


def sampled(rule):
    decoder, params = lossless.toy_decoder(rule, rejection(), MOST, distance=0.5)
    return lossless.test_by_sampling(decoder, params, tokens=MOST + 1, sequences=16_384)


@pytest.mark.seldom
@pytest.mark.optimised
def test_a_rule_that_knew_the_uniforms_would_be_seen(monkeypatch):
    """With the hole opened again the sampled test rejects the cheat; closed, it is honest."""
    monkeypatch.setattr("specdec_jax.decoding.rounds.policy_seeds", lambda seed: seed)
    report = sampled(policy(PLACES["token 2"], improbable))
    assert not report.lossless and min(report.p_value, report.least) < 1e-6
    assert report.drafted[-1] > 500


@pytest.mark.optimised
def test_the_same_rule_without_the_seed_is_honest():
    assert "seed" not in RoundContext._fields
    assert sampled(policy(PLACES["token 2"], improbable)).lossless


@pytest.mark.parametrize("place", OF_THE_ROW)
def test_honest_policies_that_act_there_only_pass(place):
    """By the distribution, where one is looked at; the next token is not known, so its own chance stands for it."""
    rule = policy(PLACES[place], by_chance if place == "token 2" else uncertain)
    result, rows, coverage = enumerated(rule, rejection())
    assert result.measure < 2e-6 and not result.wrong and not rows.wrong and rows.counts["answers"] > 1_000
    if place.startswith("draft"):
        draft = int(place[-1])
        declined = coverage.declined
        assert coverage.shown == draft and declined[draft - 1] > 0 and declined.sum() == declined[draft - 1]
    else:
        assert coverage.shown == MOST
    assert coverage.asked.min() > 0


@pytest.mark.parametrize("place", ["row 1", "next row"])
def test_policies_whose_rows_look_at_each_other_are_rejected(place):
    result, rows, _ = enumerated(policy(PLACES[place], uncertain), rejection())
    assert "the policy's check differs for the same row" in rows.wrong and result.wrong == rows.wrong


# Verifiers


def verifier(where, fair):
    """Accepts half of what it could there; a fair one gives the rest to the next token, a cheat does not."""

    def init(batch):
        return Rounds(full(batch, 0, dtype=jnp.int32))

    def verify(state, draft, distributions, context):
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)

        def share(token, index):
            there = where(context, jnp.broadcast_to(index, token.shape), token, state.played[:, None])
            return jnp.where(jnp.broadcast_to(there, token.shape), 0.5, 1.0)

        places = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
        accept = jnp.minimum(0.0, log_p_token - log_q_token) + jnp.log(share(draft.tokens, places))
        log_prob_accepted = token_by_token(accept.astype(log_p.dtype), draft)

        def next_distribution(accepted):
            def recovered(log_p, log_q):
                tokens = jnp.broadcast_to(jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, :], log_p.shape)
                taken = share(tokens, accepted[:, None]) if fair else 1.0
                return jnp.exp(log_p) - taken * jnp.minimum(jnp.exp(log_p), jnp.exp(log_q))

            return bonus_or(recovered, draft, log_p, log_q, accepted)

        return log_prob_accepted, next_distribution, Rounds(state.played + 1)

    return rejection().replace(init=init, verify=verify)


VERIFIED = PLACES | {name: lambda *where, place=PLACES[name]: place(*where)[:, None] for name in ("row 1", "next row")}
TO_THE_END = static(draft_length=MOST)


@pytest.mark.parametrize("place", VERIFIED)
def test_verifiers_that_cheat_there_only_are_rejected(place):
    result, _, _ = enumerated(TO_THE_END, verifier(VERIFIED[place], fair=False))
    example = result.counterexample
    assert result.measure > 0.001 and abs(example.probability - example.expected) > 1e-5


@pytest.mark.parametrize("place", OF_THE_ROW)
def test_verifiers_that_are_fair_there_pass(place):
    result, rows, coverage = enumerated(TO_THE_END, verifier(VERIFIED[place], fair=True))
    assert result.measure < 2e-6 and not rows.wrong and coverage.accepted.all()
