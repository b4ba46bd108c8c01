"""The fitted entropy factor and its interval, against the plain way to say the same."""

import numpy as np
import pytest

from specdec_jax.metrics.separation import entropy_factor_interval, fitted_entropy_factor

FACTOR = 0.3


def tokens(texts, each=60, seed=0):
    """Entropies, what was accepted as AdaEDL's bound says, and whose text it is; texts differ in how well."""
    rng = np.random.default_rng(seed)
    of_text = np.repeat(np.arange(texts), each)
    entropy = rng.gamma(1.0, 1.0, texts * each)
    factor = FACTOR * rng.lognormal(0.0, 0.5, texts)[of_text]
    accepted = rng.uniform(size=entropy.shape) < np.maximum(0.0, 1 - np.sqrt(factor * entropy))
    return entropy, accepted, of_text


def test_the_interval_is_that_of_factors_fitted_to_resampled_texts():
    entropy, accepted, texts = tokens(8)
    rng, fitted = np.random.default_rng(1), []
    for _ in range(400):
        chosen = np.concatenate([np.flatnonzero(texts == text) for text in rng.integers(0, 8, 8)])
        fitted.append(fitted_entropy_factor(entropy[chosen], accepted[chosen]))
    found = entropy_factor_interval(entropy, accepted, texts)
    assert found.estimate == fitted_entropy_factor(entropy, accepted) and found.low < FACTOR < found.high
    np.testing.assert_allclose(found[1:], np.quantile(fitted, (0.025, 0.975)), rtol=0.1)


def test_more_texts_tell_the_factor_better_and_one_tells_no_interval():
    few, many = (entropy_factor_interval(*tokens(texts)) for texts in (6, 60))
    assert many.high - many.low < 0.6 * (few.high - few.low)
    alone = entropy_factor_interval(*tokens(1))
    assert np.isnan(alone.low) and np.isnan(alone.high)


def test_an_interval_leaves_out_a_fortieth_of_the_resamples_at_either_end():
    """Of three texts each is drawn alone in 1/27 of the resamples: the bounds are factors of a single text."""
    shares = [1 - np.sqrt(factor * 0.4) for factor in (0.1, 0.4, 1.6)]
    accepted = np.concatenate([np.arange(2000) < 2000 * share for share in shares])
    found = entropy_factor_interval(np.full(6000, 0.4), accepted, np.repeat(np.arange(3), 2000))
    assert found[1:] == pytest.approx((0.1, 1.6), rel=0.02)


@pytest.mark.parametrize(("accepted", "least", "most"), [(True, 0.0, 0.002), (False, 4.9, 5.0)])
def test_all_accepted_or_none_is_an_end_of_the_range(accepted, least, most):
    entropy, _, texts = tokens(4)
    found = entropy_factor_interval(entropy + 0.1, np.full(entropy.shape, accepted), texts)
    assert least < found.low <= found.high <= most + 1e-9
