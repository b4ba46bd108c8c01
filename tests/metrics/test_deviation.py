"""One emitted token's distribution after a lossy verifier: closed forms against sums over paths, and along texts."""

import functools

import jax
import jax.numpy as jnp
import lossy_oracles as plain
import numpy as np
import plain_oracles as oracles
import pytest
from lossy_oracles import tables

from specdec_jax.decoding.sampling import distributions, make_warp
from specdec_jax.lossless import toy_decoder
from specdec_jax.metrics import deviation
from specdec_jax.stopping import static
from specdec_jax.verification import rejection


@functools.cache
def two_distributions(temperature):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 1, 40, 9)) * rng.uniform(0.2, 3, (1, 1, 40, 1))
    logits[1] = 0.7 * logits[0] + 0.6 * logits[1]
    warp = {"temperature": temperature}
    ours = [jax.jit(distributions)(jnp.asarray(table, jnp.float32), make_warp(1, **warp)) for table in logits]
    his = [np.apply_along_axis(lambda row: oracles.warp(row, **warp), -1, table[0]) for table in logits]
    return ours, his, np.apply_along_axis(oracles.softmax, -1, logits[0][0])


EMITTED = {
    "rejection": [{}],
    "lenience": [{"lenience": 0.3}, {"lenience": 0.8}, {"lenience": 1.0}],
    "typical": [{"epsilon": 0.09, "delta": 0.3}, {"epsilon": 0.3, "delta": 0.9}],
    "easd": [{"drafter_entropy": 1.0, "target_entropy": 1.0, "overlap": 0.6, "top_n": 4}],
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", EMITTED)
def test_the_distribution_of_one_token_in_closed_form(name, temperature):
    (target, drafter), (p, q), raw = two_distributions(temperature)
    is_sampled = jnp.full((1, 1, 1), temperature > 0)
    for hyperparameters in EMITTED[name]:
        found = np.asarray(deviation.DISTRIBUTIONS[name](target, drafter, is_sampled, **hyperparameters))[0]
        for row in range(len(p)):
            given = hyperparameters | ({} if temperature else {"raw": raw[row]})
            expected = plain.emitted_distribution(plain.VERIFIERS[name], p[row], q[row], given)
            np.testing.assert_allclose(found[row], expected, atol=2e-6)
        moved = 0.5 * np.abs(found - p).sum(axis=-1).max()
        same = name == "rejection" or hyperparameters.get("lenience") == 1 or (temperature == 0 and name != "lenience")
        assert (moved < 1e-5) if same else (moved > 0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deviations_along_a_text(temperature):
    decoder, params = toy_decoder(static(), rejection(), toy=1)
    text = np.random.default_rng(0).integers(0, 3, (2, 23)).astype(np.int32)
    options = {"verifier": "lenience", "hyperparameters": {"lenience": 0.3}, "warp": make_warp(2, temperature)}
    found = deviation.deviations(decoder, params, text, chunk=4, **options)
    p, q = tables(params, {"temperature": temperature})
    raw = tables(params, {"temperature": 1.0})[0]
    assert found.total_variation.shape == (2, 22)
    for row in range(2):
        for at in range(22):
            before = (text[row, at - 1] if at else 0, text[row, at])
            given = {"lenience": 0.3} | ({} if temperature else {"raw": raw[before]})
            out = plain.emitted_distribution(plain.lenience, p[before], q[before], given)
            np.testing.assert_allclose(found.total_variation[row, at], 0.5 * np.abs(out - p[before]).sum(), atol=2e-6)
            np.testing.assert_allclose(found.log_likelihood[row, at], np.log(raw[before][text[row, at + 1]]), atol=1e-5)
            assert found.first_choice[row, at] == (text[row, at + 1] == np.argmax(raw[before]))
            if temperature:
                expected = sum(a * np.log(a / b) for a, b in zip(out, p[before], strict=True) if a > 0)
                np.testing.assert_allclose(found.divergence[row, at], expected, atol=2e-5)


def test_settings_share_the_passes():
    """N settings at once give what each gives alone, and what does not depend on them once."""
    decoder, params = toy_decoder(static(), rejection(), toy=1)
    text = np.random.default_rng(0).integers(0, 3, (2, 10)).astype(np.int32)
    lenience = np.array([0.3, 0.9, 0.6], np.float32)

    def found(value):
        given = {"verifier": "lenience", "hyperparameters": {"lenience": value}, "chunk": 4}
        return deviation.deviations(decoder, params, text, **given)

    together = found(lenience)
    for index, value in enumerate(lenience):
        alone = found(value)
        np.testing.assert_allclose(together.total_variation[index], alone.total_variation, atol=1e-6)
        np.testing.assert_allclose(together.divergence[index], alone.divergence, atol=1e-6)
        np.testing.assert_array_equal(together.log_likelihood, alone.log_likelihood)
    assert np.ptp(together.total_variation, axis=0).max() > 0.01


def test_deviations_refuse_what_they_do_not_know():
    decoder, params = toy_decoder(static(), rejection())
    with pytest.raises(ValueError, match="no emitted distribution of 'block'"):
        deviation.deviations(decoder, params, [[0, 1]], verifier="block")
    with pytest.raises(ValueError, match=r"^deviations need texts of one length in \[2, \d+\], got \[1\]$"):
        deviation.deviations(decoder, params, [[0]], verifier="typical")
