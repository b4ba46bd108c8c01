"""Each loss against float64 numpy written out, its gradient by finite differences, and the distributions' zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.decoding import sampling
from specdec_jax.distillation.losses import (
    coarse_distributions,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    scheduled,
    total_variation,
    tvd_plus_plus,
)

pytestmark = pytest.mark.slow

N, OUTCOMES = 5, 7
START = jnp.zeros(())
rng = np.random.default_rng(0)
P_LOGITS, Q_LOGITS = (rng.normal(size=(N, OUTCOMES)) * 1.5 for _ in range(2))


def softmax(logits):
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def naive_tvd_plus_plus(p, q, frozen):
    """The surrogate with the distributions at the point of linearisation in `frozen`: only log q moves."""
    total, first, second = 0.0, 0.0, 0.0
    for row in range(len(p)):
        for x in range(p.shape[1]):
            r = 1.0 if p[row, x] > frozen[row, x] else 0.0
            total, first, second = total + frozen[row, x], first + frozen[row, x] * r, second + frozen[row, x] * r * r
    mean = first / total
    sigma = np.sqrt(second / total - mean**2)
    advantage = ((p > frozen) - mean) / sigma
    return -(frozen * advantage * np.log(q)).sum(-1)


NAIVE = {
    "forward_kl": (forward_kl, lambda p, q, _: (p * np.log(p / q)).sum(-1)),
    "reverse_kl": (reverse_kl, lambda p, q, _: (q * np.log(q / p)).sum(-1)),
    "jensen_shannon": (
        jensen_shannon(0.3),
        lambda p, q, _: (
            0.3 * (p * np.log(p / (0.3 * p + 0.7 * q))).sum(-1) + 0.7 * (q * np.log(q / (0.3 * p + 0.7 * q))).sum(-1)
        ),
    ),
    "total_variation": (total_variation, lambda p, q, _: 1 - np.minimum(p, q).sum(-1)),
    "tvd_plus_plus": (tvd_plus_plus, naive_tvd_plus_plus),
    "scheduled": (
        scheduled(forward_kl, total_variation, start=0.2, stop=0.4),
        lambda p, q, _: 0.75 * (p * np.log(p / q)).sum(-1) + 0.25 * (1 - np.minimum(p, q).sum(-1)),
    ),
}
PROGRESS = jnp.asarray(0.25)


def log(distribution):
    return jnp.asarray(np.log(distribution), jnp.float32)


@pytest.mark.parametrize("name", NAIVE)
def test_values_are_those_of_numpy(name):
    loss, naive = NAIVE[name]
    p, q = softmax(P_LOGITS), softmax(Q_LOGITS)
    np.testing.assert_allclose(loss(log(p), log(q), PROGRESS), naive(p, q, q), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAIVE)
def test_gradients_are_finite_differences(name):
    loss, naive = NAIVE[name]
    p, frozen, step = softmax(P_LOGITS), softmax(Q_LOGITS), 1e-6

    def value(logits):
        return jnp.sum(loss(log(p), jax.nn.log_softmax(logits, axis=-1), PROGRESS))

    gradient = jax.grad(value)(jnp.asarray(Q_LOGITS, jnp.float32))
    for index in np.ndindex(N, OUTCOMES):
        moved = Q_LOGITS.copy(), Q_LOGITS.copy()
        moved[0][index] += step
        moved[1][index] -= step
        slope = (naive(p, softmax(moved[0]), frozen).sum() - naive(p, softmax(moved[1]), frozen).sum()) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-4)


def test_total_variation_is_one_minus_acceptance():
    p, q = log(softmax(P_LOGITS)), log(softmax(Q_LOGITS))
    accepted = jnp.sum(jnp.minimum(jnp.exp(p), jnp.exp(q)), axis=-1)
    np.testing.assert_allclose(total_variation(p, q, START), 1 - accepted, atol=1e-6)
    np.testing.assert_allclose(total_variation(p, q, START), sampling.total_variation(p, q), atol=1e-6)


def test_the_gradient_of_tvd_plus_plus_is_parallel_to_that_of_total_variation():
    """Of summed positions that share no parameters, and longer: the reward's spread is below one."""
    p, logits = log(softmax(P_LOGITS)), jnp.asarray(Q_LOGITS, jnp.float32)

    def gradient(loss):
        return jax.grad(lambda z: jnp.sum(loss(p, jax.nn.log_softmax(z, axis=-1), START)))(logits).reshape(-1)

    plain, mine = gradient(total_variation), gradient(tvd_plus_plus)
    cosine = jnp.vdot(plain, mine) / jnp.linalg.norm(plain) / jnp.linalg.norm(mine)
    assert cosine > 0.9999 and jnp.linalg.norm(mine) > 1.5 * jnp.linalg.norm(plain)


@pytest.mark.parametrize("name", NAIVE)
def test_zeros_on_either_side_leave_value_and_gradient_finite_and_the_target_untouched(name):
    loss, _ = NAIVE[name]
    p = jnp.asarray([[0.0, -jnp.inf, -jnp.inf], [-jnp.inf, 0.0, -jnp.inf]])
    logits = jnp.asarray([[-200.0, 0.0, 1.0], [0.0, 0.0, -jnp.inf]])

    def value(p, z):
        return jnp.sum(loss(p, jax.nn.log_softmax(z, axis=-1), PROGRESS))

    to_p, to_q = jax.grad(value, argnums=(0, 1))(p, logits)
    assert jnp.isfinite(value(p, logits)) and jnp.all(jnp.isfinite(to_q)) and not jnp.any(to_p)


def test_a_schedule_is_its_first_loss_then_its_second():
    p, q = log(softmax(P_LOGITS)), log(softmax(Q_LOGITS))
    loss = scheduled(forward_kl, reverse_kl, start=0.2, stop=0.4)
    for progress, expected in ((0.0, forward_kl), (0.2, forward_kl), (0.4, reverse_kl), (1.0, reverse_kl)):
        np.testing.assert_allclose(loss(p, q, jnp.asarray(progress)), expected(p, q, START), rtol=1e-6)


def coarse_of(p, q, labels):
    return coarse_distributions(jnp.take_along_axis(p, labels, axis=-1), jnp.take_along_axis(q, labels, axis=-1))


def test_the_rest_is_one_outcome():
    p, q = softmax(P_LOGITS), softmax(Q_LOGITS)
    labels = np.argsort(-p, axis=-1)[:, :3]
    for coarse, distribution in zip(coarse_of(log(p), log(q), jnp.asarray(labels)), (p, q), strict=True):
        kept = np.take_along_axis(distribution, labels, axis=-1)
        expected = np.concatenate([kept, 1 - kept.sum(-1, keepdims=True)], axis=-1)
        np.testing.assert_allclose(jnp.exp(coarse), expected, atol=2e-6)


@pytest.mark.parametrize("loss", [forward_kl, reverse_kl, jensen_shannon(), total_variation])
def test_merged_outcomes_never_raise_a_divergence(loss):
    p, q = log(softmax(P_LOGITS)), log(softmax(Q_LOGITS))
    labels = jnp.asarray(np.argsort(-P_LOGITS, axis=-1)[:, :3])
    assert jnp.all(loss(*coarse_of(p, q, labels), START) <= loss(p, q, START) + 1e-6)


def test_a_label_of_minus_infinity_belongs_to_the_rest_on_both_sides():
    top, drafter = jnp.log(jnp.asarray([[0.5, 0.2]])), jnp.log(jnp.asarray([[0.4, 0.3]]))
    p, q = coarse_distributions(jnp.asarray([[top[0, 0], -jnp.inf]]), drafter)
    np.testing.assert_allclose(jnp.exp(p), [[0.5, 0.0, 0.5]], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(q), [[0.4, 0.0, 0.6]], atol=1e-6)


def test_labels_that_hold_all_of_the_mass_give_no_nan():
    top = jnp.log(jnp.asarray([[0.75, 0.25]]))

    def value(z):
        return jnp.sum(forward_kl(*coarse_distributions(top, jax.nn.log_softmax(z, axis=-1)), START))

    logits = jnp.asarray([[3.0, 1.0]])  # the drafter's mass is all inside too
    assert jnp.isfinite(value(logits)) and jnp.all(jnp.isfinite(jax.grad(value)(logits)))


@pytest.mark.parametrize("probability", [[0.5, 0.5], [0.75, 0.375]])
def test_a_rest_of_nothing_or_less_is_clipped(probability):
    """Exact in float32, unlike a softmax: one minus their sum is 0, or under it as rounding may leave it."""
    label = jnp.log(jnp.asarray([probability]))

    def value(drafter):
        return jnp.sum(forward_kl(*coarse_distributions(label, drafter), START))

    assert jnp.isfinite(coarse_distributions(label, label)[1][0, -1])
    assert jnp.isfinite(value(label)) and jnp.all(jnp.isfinite(jax.grad(value)(label)))


def test_padding_gets_no_gradient_and_no_nan():
    top, drafter = jnp.asarray([[jnp.log(0.5), -jnp.inf, -jnp.inf]]), jnp.asarray([[-1.0, -2.0, -jnp.inf]])
    gradient = jax.grad(lambda q: jnp.sum(forward_kl(*coarse_distributions(top, q), START)))(drafter)
    assert jnp.all(jnp.isfinite(gradient)) and gradient[0, 0] != 0 and not jnp.any(gradient[0, 1:])


@pytest.mark.parametrize("q", [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], ids=["equal", "apart"])
def test_a_reward_without_spread_gives_tvd_plus_plus_no_gradient(q):
    p = jnp.log(jnp.asarray([[0.5, 0.5, 0.0]]))
    gradient = jax.grad(lambda log_q: jnp.sum(tvd_plus_plus(p, log_q, START)))(jnp.log(jnp.asarray([q])))
    assert not jnp.any(gradient)  # NaN counts as a gradient here


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jensen_shannon(0.0), "beta"),
        (lambda: jensen_shannon(1.0), "beta"),
        (lambda: scheduled(forward_kl, reverse_kl, start=0.5, stop=0.5), "start 0.5"),
        (lambda: scheduled(forward_kl, reverse_kl, start=-0.1), "start -0.1"),
        (lambda: scheduled(forward_kl, reverse_kl, stop=1.5), "stop 1.5"),
        (lambda: jensen_shannon(float("nan")), "got nan"),
    ],
)
def test_bad_constants_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
