"""The prior of `survival` from traces: known weights are found again."""

import numpy as np
import pytest

from experiments.lib.smoke import made_up_trace
from specdec_jax.metrics.prior import fit_prior, positions
from specdec_jax.replay.trace import FEATURES, select
from specdec_jax.stopping.survival import SAMPLED


def logit(chance):
    return np.log(chance) - np.log1p(-chance)


def trace_with(bias, temperature=0.0):
    """A made-up trace whose acceptance follows this bias; entropy and confidence vary independently."""
    trace, rng = made_up_trace(temperature, texts=80, tokens=120), np.random.default_rng(1)
    path = trace.path.copy()
    column = FEATURES.index
    path[..., column("entropy")] = rng.gamma(1.0, 1.0, path.shape[:2])
    path[..., column("max_prob")] = rng.uniform(0.1, 0.95, path.shape[:2])
    entropy, largest = (path[..., column(name)] for name in ("entropy", "max_prob"))
    z = bias + (-np.log(entropy + 0.02) if temperature > 0 else logit(largest))
    at = np.arange(path.shape[1])[None, :]
    accepted = (rng.uniform(size=z.shape) < 1 / (1 + np.exp(-z))) & (at < trace.length[:, None])
    rejected = (at <= trace.length[:, None]) & ~accepted
    tail_of = np.where(rejected, np.cumsum(rejected).reshape(rejected.shape) - 1, 0).astype(np.int32)
    tails = np.resize(trace.tails, (int(rejected.sum()), *trace.tails.shape[1:]))
    tails[:, 0] = path[rejected]
    return trace._replace(path=path, accepted=accepted, tail_of=tail_of, tails=tails)


@pytest.mark.parametrize("bias", [-0.8, 0.9])
def test_the_bias_that_made_a_trace_is_found_again(bias):
    found, other = fit_prior(trace_with(bias)), trace_with(-bias)
    np.testing.assert_allclose(found, (bias, 0.0), atol=0.1)
    few, many = (fit_prior(trace, trace_with(bias)).bias for trace in (select(other, range(20)), other))
    assert abs(few - many) < 0.1, "a longer trace weighs more"


def test_what_temperature_does_is_learnt_from_several_temperatures():
    parts = [trace_with(0.5 + 2.0 * np.log(t), temperature=t) for t in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(fit_prior(*parts), (0.5, 2.0), atol=0.1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_from_one_temperature_it_is_what_other_pairs_taught(temperature):
    found = fit_prior(trace_with(0.3 + SAMPLED.log_temperature * np.log(temperature), temperature=temperature))
    np.testing.assert_allclose(found, (0.3, SAMPLED.log_temperature), atol=0.1)


def test_every_position_of_the_texts_is_seen():
    trace = made_up_trace(0.7, texts=5)
    seen = positions(trace)
    expected = [trace.accepted[text, at] for text in range(5) for at in range(int(trace.length[text]))]
    assert seen.accepted.tolist() == expected


def test_chains_are_learnt_from_up_to_the_first_rejection():
    """Later drafts follow other weights than the text's positions do; what stands beyond a rejection follows none."""
    trace, rng, most = trace_with(-1.0), np.random.default_rng(2), 4
    chains = np.zeros((*trace.accepted.shape, most, len(FEATURES)))
    entropy, largest = rng.gamma(1.0, 1.0, chains.shape[:3]), rng.uniform(0.1, 0.95, chains.shape[:3])
    chains[..., FEATURES.index("entropy")], chains[..., FEATURES.index("max_prob")] = entropy, largest
    z = 1.5 + logit(largest)
    begin, left = np.arange(chains.shape[1])[None, :], trace.length[:, None]
    run = np.cumprod(rng.uniform(size=z.shape) < 1 / (1 + np.exp(-z)), axis=2).sum(axis=2)
    beyond = np.arange(most) > run[:, :, None]
    chains[beyond] = 0.5
    chained = trace._replace(chains=chains.astype(np.float32), run=np.minimum(run, np.maximum(left - begin, 0)))
    assert fit_prior(chained).bias == pytest.approx(1.5, abs=0.1)
    seen, alone = positions(chained), positions(trace)
    assert 1.2 * len(alone.accepted) < len(seen.accepted) < most * len(alone.accepted)


def test_nothing_to_learn_from_is_refused():
    trace = made_up_trace(0.0, texts=3)
    with pytest.raises(ValueError, match="one kind only"):
        fit_prior(trace._replace(accepted=np.zeros_like(trace.accepted)))
    with pytest.raises(ValueError, match="at least one trace"):
        fit_prior()
