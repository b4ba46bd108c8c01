"""Every file of stopping/, verification/ and drafters/ meets its seam, and a fork's file is tested once it exists.

A public file has a factory of its own name whose defaults are enough to build it. models/ has the same in test_models.
"""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verifier_cases import case, verified

from specdec_jax import lossless
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.function_checks import Sizes, check_policy
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters import model as model_drafter
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.lossless.rounds import TOLERANCE
from specdec_jax.models import llama
from specdec_jax.stopping import static
from specdec_jax.text.pair import MODEL_DRAFTERS
from specdec_jax.text.strategies import TYPES, choose, find_factory, names
from specdec_jax.types import Drafter, StoppingPolicy, Verifier
from specdec_jax.verification import rejection

BATCH, MOST, VOCAB = 3, 4, 11
POLICIES, VERIFIERS, DRAFTERS = names("policy"), names("verifier"), names("drafter")
RARE = {"survival_tree": [pytest.mark.seldom]}  # ten times as long as others; test_trees enumerates its siblings


@pytest.mark.parametrize("kind", ["policy", "verifier", "drafter"])
def test_every_public_file_has_a_documented_factory_of_its_name(kind):
    found = names(kind)
    assert found
    for name in found:
        factory = find_factory(kind, name)
        assert inspect.getdoc(factory) and inspect.getdoc(importlib.import_module(factory.__module__))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_keeps_its_state_per_row_and_its_shape(name):
    policy = find_factory("policy", name)()
    assert isinstance(policy, StoppingPolicy)
    state = policy.init(BATCH)
    for each in (policy, policy.as_chain()):
        check_policy(each, state, (), Sizes(BATCH, VOCAB, MOST))
    shown = jax.eval_shape(policy.threshold, state)
    assert shown.shape == (BATCH,) and shown.dtype == jnp.float32


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_hyperparameters_are_traced(name):
    policy = find_factory("policy", name)()
    given = {key: value for key, value in policy.hyperparameters.items() if value is not None}
    init = lambda hyperparameters: policy.init(BATCH, **hyperparameters)  # noqa: E731
    states = policy.init(BATCH), jax.eval_shape(init, jax.tree.map(jnp.asarray, given))
    one, other = (jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), state) for state in states)
    assert one == other and jax.tree.structure(states[0]) == jax.tree.structure(states[1])


VALUES = [(kind, name) for kind in TYPES for name in names(kind) if name not in MODEL_DRAFTERS]


@pytest.mark.parametrize(("kind", "name"), VALUES)
def test_a_strategy_is_a_value(kind, name):
    """Equal when called alike, changed by hyperparameters and not compiled by them, and written as it is read."""
    factory = find_factory(kind, name)
    value = factory()
    assert value.call is not None and value.name == name, f"@strategy belongs above {name}()"
    assert value == factory() and hash(value) == hash(factory()) and value.bare == value
    assert choose(kind, repr(value)) == value
    for key, number in value.hyperparameters.items():
        if isinstance(number, float):
            changed = factory(**{key: 0.9 * number})
            assert changed != value and changed.bare == value.bare and changed == value.but(**{key: 0.9 * number})
            assert changed.hyperparameters == {**value.hyperparameters, key: 0.9 * number}
            init = changed.init(BATCH), value.init(BATCH, **{key: 0.9 * number})
            jax.tree.map(np.testing.assert_array_equal, *init)
            assert choose(kind, repr(changed)) == changed


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifiers_lengths_are_a_distribution(name):
    """P(accepted = k) sums to one over 0..length and is zero beyond; a next distribution that can occur has mass."""
    verifier = find_factory("verifier", name)()
    assert isinstance(verifier, Verifier)
    temperature = 0.0 if verifier.greedy_only else 0.8
    draft, target, (_, length, _) = case(200, temperature=temperature, chosen=not verifier.needs_log_q)
    log_prob_accepted, weights = verified(verifier, draft, target, temperature)
    chances = np.exp(np.asarray(log_prob_accepted, np.float64))
    assert weights.shape[:2] == chances.shape and np.all(chances >= 0)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0, atol=1e-5)
    assert np.all(chances[np.arange(chances.shape[1]) > length[:, None]] == 0)
    reached = chances > 0
    assert np.all(weights[reached] >= 0) and np.all(weights[reached].sum(axis=1) > 0)


# Every verifier meets one rule, and every rule meets `rejection` in long drafts, below; the rest of the product is
# seldom. A rule that never drafts what a lossy verifier changes hides the loss (AdaEDL and easd): a lossy verifier
# meets `static` alone.
LOSSLESS = {name: find_factory("verifier", name)().lossless for name in VERIFIERS}
VERIFIED = [
    pytest.param(policy, name, marks=() if policy == "static" else pytest.mark.seldom)
    for policy in POLICIES
    for name in VERIFIERS
    if LOSSLESS[name] or policy == "static"
]


@pytest.mark.parametrize(("policy", "verifier"), VERIFIED)
def test_what_calls_itself_lossless_is(policy, verifier):
    built = find_factory("verifier", verifier)()
    shape = lossless.Shape(4, 2, 3, reads=True, chosen=False)
    rules = find_factory("policy", policy)(), built
    result, rows, _ = lossless.prove_rounds(*rules, lossless.Drawing(0), shape, rounds=3)
    assert (result.measure < TOLERANCE) == built.lossless and not rows.wrong, result


# At their defaults these say no to no draft of five, or to none after the third.
SHOWN = {"static": 0, "at_least": 0, "hazard_cost": 0, "phase_length": 3}


@pytest.mark.parametrize("name", [pytest.param(name, marks=RARE.get(name, [])) for name in POLICIES])
def test_a_policy_is_lossless_in_long_drafts_and_seen_to_stop_them(name):
    """And no row looks at another: every answer and every next state is compared beside other rows."""
    shape = lossless.Shape(8, 5, 4, reads=False, chosen=False)
    policy = find_factory("policy", name)()
    result, rows, coverage = lossless.prove_rounds(policy, rejection(), lossless.Drawing(1), shape)
    assert result.measure < 2e-6 and not rows.wrong
    assert coverage.shown == SHOWN[name] if name in SHOWN else coverage.shown >= 4, coverage


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_is_what_it_calls_itself_in_long_drafts(name):
    """And every number of accepted drafts occurs."""
    built = find_factory("verifier", name)()
    shape = lossless.Shape(8, 5, 4, reads=False, chosen=False)
    rounds = 16 if built.greedy_only else 2  # one path a request
    result, rows, coverage = lossless.prove_rounds(None, built, lossless.Drawing(0), shape, rounds=rounds)
    assert (result.measure < TOLERANCE) == built.lossless and not rows.wrong, result
    assert built.lossless is False or coverage.accepted.all()


CONFIG = llama.example_config()


def decoded(models, drafter, weights):
    tiny, target, _ = models
    widths, params = (drafter.max_draft_length + 1,), ModelParams(target, weights)
    decoder = build_decoder(tiny, drafter, static(), rejection(), verification_widths=widths)
    with jax.default_matmul_precision("highest"):
        state = decoder.prefill(params, [[1, 2, 3], [4]], max_new_tokens=12, slots=64)
        return np.asarray(decoder.run(params, state).tokens)[:, :13]


@pytest.fixture(scope="module")
def tiny_models():
    """A model, and parameters of a target and a drafter."""
    params = (llama.init_params(CONFIG, jax.random.key(seed), jnp.float32) for seed in (0, 1))
    return llama.language_model(CONFIG, jnp.float32), *params


@pytest.fixture(scope="module")
def greedy(tiny_models):
    return decoded(tiny_models, model_drafter(tiny_models[0], 1), tiny_models[2])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_decodes_as_plain_decoding_does(name, tiny_models, greedy):
    """The greedy output is the target's with every drafter; those that ask are given models or drafters."""
    factory, (tiny, target, other) = find_factory("drafter", name), tiny_models
    asks = next(iter(inspect.signature(factory).parameters), None)
    small, own = tiny, other
    if name == "reading":
        reads = llama_reading.reading_config(CONFIG, (0, 1, 2), CONFIG.hidden_size)
        small = llama_reading.language_model(reads, jnp.float32)
        own = llama_reading.with_reading(reads, other, jnp.float32)
    given = {"language_model": [small], "drafters": [[model_drafter(tiny, 2), model_drafter(tiny, 2)]]}
    drafter = factory(*given.get(asks, []))
    assert isinstance(drafter, Drafter)
    weights = {"drafters": (other, target), "language_model": own}.get(asks)
    np.testing.assert_array_equal(decoded(tiny_models, drafter, weights), greedy)
