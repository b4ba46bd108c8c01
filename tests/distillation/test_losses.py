"""Each loss against float64 numpy written out, its gradient by finite differences, and the distributions' zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.distillation.losses import coarse_distributions, forward_kl, lk_hybrid, nla

N, OUTCOMES = 5, 7
rng = np.random.default_rng(0)
P_LOGITS, Q_LOGITS = (rng.normal(size=(N, OUTCOMES)) * 1.5 for _ in range(2))
RATE = 0.5  # eta of the hybrid


def softmax(logits):
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def naive_hybrid(p, q, frozen):
    """The mixture with its weight at the point of linearisation in `frozen`."""
    weight = np.exp(-RATE * np.minimum(p, frozen).sum(-1).mean())
    return weight * (p * np.log(p / q)).sum(-1) + (1 - weight) * (1 - np.minimum(p, q).sum(-1))


NAIVE = {
    "forward_kl": (forward_kl, lambda p, q, _: (p * np.log(p / q)).sum(-1)),
    "nla": (nla, lambda p, q, _: -np.log(np.minimum(p, q).sum(-1))),
    "lk_hybrid": (lk_hybrid(RATE), naive_hybrid),
}


def log(distribution):
    return jnp.asarray(np.log(distribution), jnp.float32)


@pytest.mark.parametrize("name", NAIVE)
def test_values_are_those_of_numpy(name):
    loss, naive = NAIVE[name]
    p, q = softmax(P_LOGITS), softmax(Q_LOGITS)
    np.testing.assert_allclose(loss(log(p), log(q)), naive(p, q, q), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAIVE)
def test_gradients_are_finite_differences(name):
    loss, naive = NAIVE[name]
    p, frozen, step = softmax(P_LOGITS), softmax(Q_LOGITS), 1e-6

    def value(logits):
        return jnp.sum(loss(log(p), jax.nn.log_softmax(logits, axis=-1)))

    gradient = jax.grad(value)(jnp.asarray(Q_LOGITS, jnp.float32))
    for index in np.ndindex(N, OUTCOMES):
        moved = Q_LOGITS.copy(), Q_LOGITS.copy()
        moved[0][index] += step
        moved[1][index] -= step
        slope = (naive(p, softmax(moved[0]), frozen).sum() - naive(p, softmax(moved[1]), frozen).sum()) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAIVE)
def test_zeros_on_either_side_leave_value_and_gradient_finite_and_the_target_untouched(name):
    loss, _ = NAIVE[name]
    p = jnp.asarray([[0.0, -jnp.inf, -jnp.inf], [-jnp.inf, 0.0, -jnp.inf]])
    logits = jnp.asarray([[-200.0, 0.0, 1.0], [0.0, 0.0, -jnp.inf]])

    def value(p, z):
        return jnp.sum(loss(p, jax.nn.log_softmax(z, axis=-1)))

    to_p, to_q = jax.grad(value, argnums=(0, 1))(p, logits)
    assert jnp.isfinite(value(p, logits)) and jnp.all(jnp.isfinite(to_q)) and not jnp.any(to_p)


def coarse_of(p, q, labels):
    return coarse_distributions(jnp.take_along_axis(p, labels, axis=-1), jnp.take_along_axis(q, labels, axis=-1))


def test_the_rest_is_one_outcome():
    p, q = softmax(P_LOGITS), softmax(Q_LOGITS)
    labels = np.argsort(-p, axis=-1)[:, :3]
    for coarse, distribution in zip(coarse_of(log(p), log(q), jnp.asarray(labels)), (p, q), strict=True):
        kept = np.take_along_axis(distribution, labels, axis=-1)
        expected = np.concatenate([kept, 1 - kept.sum(-1, keepdims=True)], axis=-1)
        np.testing.assert_allclose(jnp.exp(coarse), expected, atol=2e-6)


def test_merged_outcomes_never_raise_a_divergence():
    p, q = log(softmax(P_LOGITS)), log(softmax(Q_LOGITS))
    labels = jnp.asarray(np.argsort(-P_LOGITS, axis=-1)[:, :3])
    assert jnp.all(forward_kl(*coarse_of(p, q, labels)) <= forward_kl(p, q) + 1e-6)


def test_a_label_of_minus_infinity_belongs_to_the_rest_on_both_sides():
    top, drafter = jnp.log(jnp.asarray([[0.5, 0.2]])), jnp.log(jnp.asarray([[0.4, 0.3]]))
    p, q = coarse_distributions(jnp.asarray([[top[0, 0], -jnp.inf]]), drafter)
    np.testing.assert_allclose(jnp.exp(p), [[0.5, 0.0, 0.5]], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(q), [[0.4, 0.0, 0.6]], atol=1e-6)


def test_labels_that_hold_all_of_the_mass_give_no_nan():
    top = jnp.log(jnp.asarray([[0.75, 0.25]]))

    def value(z):
        return jnp.sum(forward_kl(*coarse_distributions(top, jax.nn.log_softmax(z, axis=-1))))

    logits = jnp.asarray([[3.0, 1.0]])  # the drafter's mass is all inside too
    assert jnp.isfinite(value(logits)) and jnp.all(jnp.isfinite(jax.grad(value)(logits)))


@pytest.mark.parametrize("probability", [[0.5, 0.5], [0.75, 0.375]])
def test_a_rest_of_nothing_or_less_is_clipped(probability):
    """Exact in float32, unlike a softmax: one minus their sum is 0, or under it as rounding may leave it."""
    label = jnp.log(jnp.asarray([probability]))

    def value(drafter):
        return jnp.sum(forward_kl(*coarse_distributions(label, drafter)))

    assert jnp.isfinite(coarse_distributions(label, label)[1][0, -1])
    assert jnp.isfinite(value(label)) and jnp.all(jnp.isfinite(jax.grad(value)(label)))


def test_padding_gets_no_gradient_and_no_nan():
    top, drafter = jnp.asarray([[jnp.log(0.5), -jnp.inf, -jnp.inf]]), jnp.asarray([[-1.0, -2.0, -jnp.inf]])
    gradient = jax.grad(lambda q: jnp.sum(forward_kl(*coarse_distributions(top, q))))(drafter)
    assert jnp.all(jnp.isfinite(gradient)) and gradient[0, 0] != 0 and not jnp.any(gradient[0, 1:])


def test_bad_constants_are_named():
    with pytest.raises(ValueError, match="eta must be positive, got nan"):
        lk_hybrid(float("nan"))
