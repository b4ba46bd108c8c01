"""Lossy verifiers have the distribution documented: paths walked in plain Python against ours, summed and drawn."""

import itertools

import lossy_oracles as plain
import numpy as np
import pytest
from enumerated import LONGEST as DRAFTS
from enumerated import TOKENS, WARPS, enumerate_distribution
from lossy_oracles import tables
from refusals import refusals
from verifier_cases import VOCAB, case, log, verified

from specdec_jax import LossyVerification, build_decoder, lossless, make_warp
from specdec_jax.decoding import decoder
from specdec_jax.drafters import model
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import static
from specdec_jax.text.strategies import choose
from specdec_jax.verification import block, by_phase, easd, lenience, rejection, typical

PLAIN = toy_pair(3, 0), toy_pair(3, 1)
UNCERTAIN = {"drafter_entropy": 0.5, "target_entropy": 0.5, "overlap": 0.6}
CASES = {
    "lenience 0.3": (lenience(), "lenience", {"lenience": 0.3}),
    "lenience 0.8": (lenience(), "lenience", {"lenience": 0.8}),
    "typical": (typical(), "typical", {"epsilon": 0.09, "delta": 0.3}),
    "typical 0.3": (typical(), "typical", {"epsilon": 0.3, "delta": 0.5}),
    "easd": (easd(), "easd", UNCERTAIN),
    "easd top 2": (easd(top_n=2), "easd", {"drafter_entropy": 0.3, "target_entropy": 0.2, "overlap": 1.0, "top_n": 2}),
}


def traced(hyperparameters):
    """The hyperparameters of `init`: a set's size is static."""
    return {name: value for name, value in hyperparameters.items() if name != "top_n"}


def oracle(verify, toy, warp, hyperparameters, limit=TOKENS + 1, phases=None):
    target, drafter = tables(toy, warp)
    used = {name: float(np.float32(value)) for name, value in traced(hyperparameters).items()}
    used["top_n"] = hyperparameters.get("top_n", 8)
    if warp["temperature"] == 0:
        used["raw_target"] = tables(toy, {"temperature": 1.0})[0]
    shape = {"drafts": DRAFTS, "tokens": TOKENS, "limit": limit, "phases": phases}
    return plain.joint_distribution(verify, target, drafter, hyperparameters=used, **shape)


def enumerated(verifier, hyperparameters, warps=WARPS):
    """(toy, warp, the joint distribution, total variation from the target's) of every toy and warp."""
    rules = static(draft_length=DRAFTS), verifier.but(**traced(hyperparameters))
    for toy, warp in itertools.product(PLAIN, warps):
        joint, goal = enumerate_distribution(*rules, toy, make_warp(1, **warp))
        yield toy, warp, joint, 0.5 * np.abs(joint - goal).sum()


@pytest.mark.parametrize("name", CASES)
def test_the_enumerated_distribution_is_that_of_the_paths(name):
    verifier, kind, hyperparameters = CASES[name]
    for toy, warp, joint, _ in enumerated(verifier, hyperparameters):
        expected = oracle(plain.VERIFIERS[kind], toy, warp, hyperparameters)
        np.testing.assert_allclose(joint, expected, atol=1e-6, err_msg=f"{warp}")
        np.testing.assert_allclose(expected.sum(), 1.0)


def random_case(temperature, chosen=False):
    """(draft, the target's distributions) of 200 rows; at temperature 0 every token is the drafter's certain choice."""
    draft, target, _ = case(200, temperature=temperature, chosen=chosen)
    return (draft if chosen or temperature else draft._replace(log_q=log(np.eye(VOCAB)[draft.tokens]))), target


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("chosen", [False, True])
def test_lenience_1_is_rejection_to_the_last_bit(temperature, chosen):
    given = *random_case(temperature, chosen), temperature
    expected = verified(rejection(), *given)
    for one, other in zip(verified(lenience(), *given, lenience=1.0), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(verified(lenience(), *given, lenience=0.3)[0], expected[0])


@pytest.mark.parametrize(("temperature", "chosen"), [(0.0, False), (0.8, True)])
def test_easd_has_nothing_to_say_of_chosen_tokens(temperature, chosen):
    given = *random_case(temperature, chosen), temperature
    lengths, weights = verified(easd(), *given, drafter_entropy=0.0, target_entropy=0.0, overlap=0.0)
    expected, others = verified(rejection(), *given)
    np.testing.assert_array_equal(lengths, expected)
    reached = np.isfinite(expected)
    found, wanted = (values[reached] / values[reached].sum(-1, keepdims=True) for values in (weights, others))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


# Phases


def last_is_odd(text):
    return text[-1] % 2 if text else 0


def test_by_phase_verifies_each_round_by_its_phase():
    hyperparameters = {"lenience": 0.4}
    for toy, warp, joint, _ in enumerated(by_phase(), hyperparameters, warps=WARPS[:2]):
        rules = [plain.lenience, plain.rejection]
        expected = oracle(rules, toy, warp, hyperparameters, phases=last_is_odd)
        np.testing.assert_allclose(joint, expected, atol=1e-6)
        turned = oracle(rules[::-1], toy, warp, hyperparameters, phases=last_is_odd)
        assert np.abs(turned - expected).sum() > 1e-3


def test_by_phase_of_lossless_verifiers_is_lossless():
    both = by_phase(block(), rejection())
    assert both.lossless and both.needs_phases and max(case[-1] for case in enumerated(both, {})) < 1e-12
    assert not by_phase().lossless and not by_phase(rejection(), typical()).lossless
    assert not by_phase(typical(), typical()).needs_log_q


def test_by_phase_hands_hyperparameters_on():
    assert by_phase().hyperparameters == lenience().hyperparameters == {"lenience": 0.5}
    two = by_phase(lenience(lenience=0.4), lenience())
    assert two.hyperparameters == {"routine_lenience": 0.4, "reasoning_lenience": 0.5}
    state = by_phase(lenience(), typical()).init(2, lenience=0.4, delta=0.2)
    assert np.allclose(state.routine.lenience, 0.4) and np.allclose(state.reasoning.delta, 0.2)
    two = by_phase(lenience(), lenience()).init(2, routine_lenience=0.4, reasoning_lenience=[0.8, 0.9])
    assert np.allclose(two.routine.lenience, 0.4) and np.allclose(two.reasoning.lenience, [0.8, 0.9])


test_what_is_refused = refusals(
    (lambda: by_phase(routine=3), "a verifier for routine phases, got 3"),
    (lambda: choose("verifier", "by_phase(routine=typcal)"), "unknown verifier 'typcal'; did you mean 'typical'"),
    (lambda: decoder_of(by_phase()), "verifier reads phases"),
)


# The whole decoder


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("name", ["lenience 0.3", "typical", "easd", "by_phase"])
def test_the_whole_decoder_draws_from_that_distribution_and_not_the_targets(name):
    verifier, kind, hyperparameters = CASES.get(name, (by_phase(), "lenience", {"lenience": 0.3}))
    toy, limit = toy_pair(3, 0), TOKENS + DRAFTS
    rules, phases = plain.VERIFIERS[kind], None
    if name == "by_phase":
        rules, phases = [plain.lenience, plain.rejection], last_is_odd
    expected = oracle(rules, toy, WARPS[0], hyperparameters, limit, phases)
    decoder, params = lossless.toy_decoder(static(), verifier, DRAFTS)
    options = {"policy_hyperparameters": {"draft_length": DRAFTS}, "tokens": TOKENS}
    options["verifier_hyperparameters"] = traced(hyperparameters)
    drawn = lossless.test_by_sampling(decoder, params, against=expected, sequences=20_480, **options)
    assert drawn.p_value > 1e-3 and drawn.degrees >= 15
    assert lossless.test_by_sampling(decoder, params, sequences=20_480, **options).p_value < 1e-12


# What is said


def decoder_of(verifier):
    small = table_model(3)
    return build_decoder(small, model(small, 2), static(), verifier)


def test_lossy_says_so_once(monkeypatch):
    monkeypatch.setattr(decoder, "_warned", set())
    with pytest.warns(LossyVerification) as found:
        decoder_of(lenience())
        decoder_of(lenience())
        decoder_of(rejection())
        decoder_of(typical())
    assert [str(one.message).split()[0] for one in found] == ["lenience", "typical"]
    assert issubclass(LossyVerification, UserWarning) and found[0].filename == __file__
