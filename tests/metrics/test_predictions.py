"""What traces predict: the bound with foresight, the speed-up of a rule, and the prior of survival."""

import numpy as np
import pytest

from experiments.lib.smoke import made_up_trace, tiny_pair
from specdec_jax.costs.cost_model import RuleCost, cost_model, flat
from specdec_jax.metrics.foresight import drafts_from, with_foresight
from specdec_jax.metrics.intervals import ratio_of_totals
from specdec_jax.metrics.predicted import as_fast, costs_counted, faster, predicted
from specdec_jax.metrics.prior import chances, fit_prior, learnt_by_text, positions
from specdec_jax.replay.replay import oracle, replay, rounds_of
from specdec_jax.replay.trace import FEATURES, select
from specdec_jax.stopping import phase_length, static, survival
from specdec_jax.stopping.survival import PRIOR
from specdec_jax.text.generation import build_pair

MOST = 5


@pytest.fixture(scope="module", params=(0.0, 0.7))
def two_traces(request):
    return made_up_trace(request.param, texts=8, tokens=24, longest=MOST)


def test_the_draft_of_every_round_is_the_one_that_a_live_round_would_see(two_traces):
    features, run = drafts_from(two_traces, MOST), np.minimum(two_traces.accepted_runs(), MOST)
    for text in range(two_traces.num_texts):
        for begin in range(int(two_traces.length[text])):
            hits = 0
            for step in range(MOST):
                at = begin + hits
                hit = hits == step and two_traces.accepted[text, at]
                seen = two_traces.path[text, at] if hit else two_traces.tails[two_traces.tail_of[text, at], step - hits]
                np.testing.assert_array_equal(features[text, begin, step], seen)
                hits += int(hit)
            assert run[text, begin] == hits


@pytest.mark.parametrize("length", (0, 2, MOST))
def test_rounds_of_one_length_are_those_of_the_static_rule(two_traces, length):
    room = np.maximum(two_traces.limit[:, None] - np.arange(two_traces.accepted.shape[1]) - 1, 0)
    played = rounds_of(two_traces, np.minimum(length, room), MOST)
    expected = replay(two_traces, static(), {"draft_length": length}, max_draft_length=MOST)
    for name in ("rounds", "emitted", "drafted", "accepted", "passes", "by_length"):
        np.testing.assert_array_equal(getattr(played, name), getattr(expected, name))
    if length == MOST:  # free drafts are made up to the text's limit, and not beyond it
        np.testing.assert_array_equal(with_foresight(two_traces, flat(0.0, MOST)).by_length, expected.by_length)


def test_chances_are_those_that_the_prior_was_fitted_on(two_traces):
    """Along the text they sum to what was accepted, as a logistic regression's do; greedily nothing is fitted."""
    texts, at = np.nonzero(np.arange(two_traces.accepted.shape[1])[None] < two_traces.length[:, None])
    first, temperature = drafts_from(two_traces, 1)[texts, at, 0], two_traces.temperature[texts]
    if temperature[0] == 0:
        np.testing.assert_allclose(chances(PRIOR, first, temperature), first[:, FEATURES.index("raw_max_prob")])
        return
    prior, seen = fit_prior(two_traces), positions(two_traces)
    predicted = chances(prior, first, temperature)
    assert abs(predicted.mean() - seen.accepted.mean()) < 0.01
    assert np.corrcoef(predicted, seen.accepted)[0, 1] > 0.3


def test_chances_learnt_by_text_are_the_shares_that_were_accepted():
    """Of two texts as confident as each other one is rejected throughout; the prior takes them for equal."""
    two_traces = made_up_trace(0.0, texts=2, tokens=64, longest=MOST)
    at = np.arange(two_traces.accepted.shape[1])[None] < two_traces.length[:, None]
    path = two_traces.path.copy()
    path[..., FEATURES.index("raw_max_prob")] = 0.9999
    accepted = at & np.array([[True], [False]])
    two_traces = two_traces._replace(path=path, accepted=accepted, tail_of=np.zeros_like(two_traces.tail_of))
    learnt = learnt_by_text(PRIOR, two_traces)
    first, second = chances(PRIOR, path[:, 0], two_traces.temperature, learnt)
    assert first > 0.95 and second < 0.3
    assert abs(np.subtract(*chances(PRIOR, path[:, 0], two_traces.temperature))) < 1e-9


def test_it_lies_between_rules_and_the_oracle_and_does_not_draft_what_never_pays():
    two_traces, costs = made_up_trace(0.7, texts=48, tokens=96), cost_model(0.1, {1: 1.0, 4: 1.05, 8: 1.2, 17: 1.5})
    bound = with_foresight(two_traces, costs).total_speedup(costs)[0]
    hyperparameters = {"drafter_cost": costs.ratio, "verification_times": costs.verification_times(16)[None]}
    rules = [(survival(), hyperparameters), *((static(), {"draft_length": length}) for length in range(6))]
    fastest = max(replay(two_traces, rule, given).total_speedup(costs)[0] for rule, given in rules)
    assert fastest < bound < oracle(two_traces).total_speedup(costs)[0]
    costs = flat(5.0, 16)
    assert with_foresight(made_up_trace(0.7), costs).total_speedup(costs)[0] == 1.0


DRAFTS = 4
TIMES = {1: 1.0, 3: 1.1, 5: 1.3}


def pair_with(c, times=TIMES):
    costs = cost_model(c, times)
    return build_pair(*tiny_pair(), costs=costs, max_draft_length=DRAFTS, verification_widths=(1, 3, 5))


@pytest.fixture(scope="module")
def trace():
    return made_up_trace(texts=6, tokens=24)


def test_a_static_length_breaks_even_at_its_c(trace):
    rule = static(draft_length=2)
    c = predicted(pair_with(0.1), trace, rule, 64).break_even
    assert 0.1 < c < 2
    assert predicted(pair_with(c), trace, rule, 64).speedup.estimate == pytest.approx(1.0)
    assert predicted(pair_with(0.9 * c), trace, rule, 64).speedup.estimate > 1
    never = predicted(pair_with(0.1), trace, static(draft_length=0), 64)
    assert np.isnan([never.break_even, never.acceptance_rate]).all() and never.speedup.estimate == 1


def test_cost_rules_get_the_pairs_costs_and_phases_are_those_of_the_monitor(trace):
    pair = pair_with(0.02, {1: 1.0, 3: 1.4, 5: 2.0})
    costs = costs_counted(pair)
    options = {"drafter_cost": 0.02, "verification_times": costs.verification_times(DRAFTS)[None]}
    found = replay(trace, survival(), options, max_draft_length=DRAFTS).seconds(costs)[0]
    np.testing.assert_allclose(predicted(pair, trace, survival(), 64).seconds, found)
    assert not np.allclose(replay(trace, survival(), max_draft_length=DRAFTS).seconds(costs)[0], found)
    rule = phase_length(routine_length=3, reasoning_length=1)
    calm = trace._replace(raw_target_entropy=trace.raw_target_entropy * 0)
    expected = predicted(pair_with(0.1), trace, static(draft_length=3), 64).seconds
    assert predicted(pair_with(0.1), calm, rule, 64).seconds == pytest.approx(expected)


def test_predictions_are_of_the_temperature_and_count_the_rules_own_computation(trace):
    own = (RuleCost("static", 0.01, 0.02, 0.03, 0.04),)
    sampled = {"sampled_step": 0.3, "sampled_pass": (2.0, 2.2, 2.6), "sampled_plain": 2.0}
    pair = pair_with(0.1)
    both = pair._replace(costs=pair.costs._replace(rules=own, **sampled))
    for temperature, (step, each, scale) in {0.0: (0.01, 0.02, 1.0), 0.7: (0.03, 0.04, 2.0)}.items():
        at = made_up_trace(temperature, texts=6, tokens=24)
        alone, found = (predicted(one, at, static(draft_length=2), 64) for one in (pair, both))
        counts = replay(at, static(), {"draft_length": 2}, max_draft_length=DRAFTS)
        steps = counts.passes[0] * (0.3 if temperature else 0.1)
        expected = scale * (alone.seconds - 0.1 * counts.passes[0]) + steps
        expected = expected + counts.passes[0] * step + counts.rounds[0] * each
        np.testing.assert_allclose(found.seconds, expected)
        assert found.speedup.estimate == pytest.approx(scale * at.length.sum() / expected.sum())


def test_two_rules_are_compared_text_by_text(trace):
    pair = pair_with(0.1)
    found = [predicted(pair, trace, static(draft_length=length), 64) for length in (0, 1, 2)]
    best = max(found, key=lambda one: one.speedup.estimate)
    plain, marks = found[0], as_fast(found)
    assert faster(best, plain).estimate == pytest.approx(best.speedup.estimate)
    assert marks[found.index(best) if best is not plain else 0] and not marks[0]
    assert faster(plain, best).high < 1
    alone = [predicted(pair, select(trace, [0]), one.policy, 64) for one in found]
    assert all(as_fast(alone)), "one text tells nothing apart"


def test_texts_that_differ_more_than_rules_do_tell_them_apart(trace):
    one = predicted(pair_with(0.1), trace, static(draft_length=1), 64)
    plain = trace.length * 1.0

    def taking(seconds):
        return one._replace(seconds=seconds, speedup=ratio_of_totals(plain, seconds))

    easy = plain / np.linspace(1, 4, trace.num_texts)
    found = [taking(easy * 1.02), taking(easy), taking(easy * np.tile([0.9, 1.2], trace.num_texts // 2))]
    assert found[0].speedup.high > found[1].speedup.low, "their own intervals overlap"
    assert as_fast(found) == [False, True, True]


def test_every_number_is_total_over_total(trace):
    pair, rule = pair_with(0.2), static(draft_length=3)
    one, found = predicted(pair, trace, rule, 64), replay(trace, static(), {"draft_length": 3}, max_draft_length=DRAFTS)
    assert one.speedup.estimate == pytest.approx(float(found.total_speedup(costs_counted(pair))[0]))
    assert one.tokens == pytest.approx(trace.num_positions / found.rounds.sum())
    assert one.drafted == pytest.approx(found.drafted.sum() / found.rounds.sum())


TAUGHT = PRIOR.log_temperature


def trace_with(bias, temperature=1.0):
    """A made-up trace whose acceptance follows this bias; entropy and confidence vary independently."""
    trace, rng = made_up_trace(temperature, texts=80, tokens=120), np.random.default_rng(1)
    path = trace.path.copy()
    column = FEATURES.index
    path[..., column("entropy")] = rng.gamma(1.0, 1.0, path.shape[:2])
    path[..., column("max_prob")] = rng.uniform(0.1, 0.95, path.shape[:2])
    z = bias - np.log(path[..., column("entropy")] + 0.02)
    at = np.arange(path.shape[1])[None, :]
    accepted = (rng.uniform(size=z.shape) < 1 / (1 + np.exp(-z))) & (at < trace.length[:, None])
    rejected = (at <= trace.length[:, None]) & ~accepted
    tail_of = np.where(rejected, np.cumsum(rejected).reshape(rejected.shape) - 1, 0).astype(np.int32)
    tails = np.resize(trace.tails, (int(rejected.sum()), *trace.tails.shape[1:]))
    tails[:, 0] = path[rejected]
    return trace._replace(path=path, accepted=accepted, tail_of=tail_of, tails=tails)


@pytest.mark.parametrize(
    ("biases", "expected"),
    [
        *(({1.0: bias}, (bias, TAUGHT)) for bias in (-0.8, 0.9)),
        ({t: 0.5 + 2.0 * np.log(t) for t in (0.5, 1.0, 2.0)}, (0.5, 2.0)),
        *(({t: 0.3 + TAUGHT * np.log(t)}, (0.3, TAUGHT)) for t in (0.7, 1.0)),  # by other pairs
    ],
)
def test_the_numbers_that_made_traces_are_found_again(biases, expected):
    found = fit_prior(*(trace_with(bias, temperature) for temperature, bias in biases.items()))
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_a_longer_trace_weighs_no_more():
    other = trace_with(0.8)
    few, many = (fit_prior(trace, trace_with(-0.8)).bias for trace in (select(other, range(20)), other))
    assert abs(few - many) < 0.1


def test_every_position_of_the_texts_is_seen():
    trace = made_up_trace(0.7, texts=5)
    expected = [trace.accepted[text, at] for text in range(5) for at in range(int(trace.length[text]))]
    assert positions(trace).accepted.tolist() == expected


def test_chains_are_learnt_from_up_to_the_first_rejection():
    """Later drafts follow other weights than the text's positions do; what stands beyond a rejection follows none."""
    trace, rng, most = trace_with(-1.0), np.random.default_rng(2), 4
    chains = np.zeros((*trace.accepted.shape, most, len(FEATURES)))
    entropy = rng.gamma(1.0, 1.0, chains.shape[:3])
    chains[..., FEATURES.index("entropy")] = entropy
    z = 1.5 - np.log(entropy + 0.02)
    begin, left = np.arange(chains.shape[1])[None, :], trace.length[:, None]
    run = np.cumprod(rng.uniform(size=z.shape) < 1 / (1 + np.exp(-z)), axis=2).sum(axis=2)
    beyond = np.arange(most) > run[:, :, None]
    chains[beyond] = 0.5
    chained = trace._replace(chains=chains.astype(np.float32), run=np.minimum(run, np.maximum(left - begin, 0)))
    assert fit_prior(chained).bias == pytest.approx(1.5, abs=0.1)
    seen, alone = positions(chained), positions(trace)
    assert 1.2 * len(alone.accepted) < len(seen.accepted) < most * len(alone.accepted)


def test_nothing_to_learn_from_is_refused():
    trace = made_up_trace(0.7, texts=3)
    with pytest.raises(ValueError, match="one kind only"):
        fit_prior(trace._replace(accepted=np.zeros_like(trace.accepted)))
    for traces in ((), (trace, made_up_trace(0.0, texts=3))):
        with pytest.raises(ValueError, match="at least one trace to learn from, and sampled ones only"):
            fit_prior(*traces)
