"""A replay's rounds are the live decoder's: one by one under greedy decoding, in distribution when sampled."""

import jax.numpy as jnp
import numpy as np
import pytest
import replayed
from refusals import refusals
from replayed import assert_same_rounds, decoded, gap
from rules import FAST

from specdec_jax.costs.cost_model import cost_model, flat
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters import model
from specdec_jax.lossless import toys
from specdec_jax.monitors import phases
from specdec_jax.replay.phase_path import phase_path
from specdec_jax.replay.replay import Replay, oracle, replay
from specdec_jax.stopping import adaedl, draft_and_verify, phase_length, static, survival, update_every
from specdec_jax.text.strategies import find_factory, names

MOST, VOCAB, LIMIT = 6, 12, 60
TABLE = toys.table_model(VOCAB)
PAIR = toys.toy_pair(VOCAB, 5, distance=0.6)
PARAMS = ModelParams(*(jnp.asarray(table) for table in PAIR[:2]))


def live(policy, prompts, hyperparameters, *, limit=LIMIT, **options):
    begun = {"policy_hyperparameters": hyperparameters, "record_rounds": limit, "monitor_hyperparameters": WATCH}
    options |= {"limit": limit, "decoder_options": {"monitor": phases()}, "prefill_options": begun}
    return decoded(TABLE, model(TABLE, MOST, catch_up=4), PARAMS, prompts, policy, **options)


def trace_of(prompts, limit=LIMIT, **options):
    return replayed.trace_of((TABLE, TABLE), PARAMS, prompts, most=MOST, limit=limit, **options)


PROMPTS = [[a, b] for a in range(4) for b in range(5)]
STOPS = (5,)
TRUNCATED = {"top_k": 7, "top_p": 0.9, "min_p": 0.01}  # at temperature 0 they change nothing but what rules read
RULES = {  # the first are in every run
    "adaedl_fast": (adaedl(), FAST),
    "adaedl_keep_fast": (adaedl(keep_checked_token=True), FAST),
    "static_0": (static(), {"draft_length": 0}),
} | {name: (find_factory("policy", name)(), {}) for name in ("survival", "static", *names("policy"))}
WATCH = {"enter": 0.8, "leave": 0.75, "minimum_length": 2, "decay": 0.5}  # of the phases, for rules that read them


@pytest.fixture(scope="module")
def greedy_trace():
    """Texts that end in both ways and whose tokens are rejected now and then."""
    trace = trace_of(PROMPTS, stop_ids=STOPS, **TRUNCATED)
    assert 3 <= (trace.length < trace.limit).sum() <= len(PROMPTS) - 3
    assert 0.3 < trace.accepted.sum() / trace.num_positions < 0.95
    return trace


@pytest.mark.often(4)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_rounds_are_the_live_ones(rule, greedy_trace):
    policy, hyperparameters = RULES[rule]
    state = live(policy, PROMPTS, hyperparameters, stop_ids=STOPS)
    found = replay(greedy_trace, policy, hyperparameters, record=True, phases=phase_path(greedy_trace, **WATCH))
    assert_same_rounds(found, state)
    for field, name in (("passes", "drafter_passes"), ("discarded", "discarded_passes")):
        np.testing.assert_array_equal(getattr(found, field)[0], getattr(state.statistics, name))
    for field, name in (("drafted", "drafted_at"), ("accepted", "accepted_at")):  # of trees those of the chain
        np.testing.assert_array_equal(getattr(found, field)[0], getattr(state.statistics, name).sum(axis=1))
    np.testing.assert_array_equal(found.emitted[0], state.statistics.num_emitted_tokens)


def test_tails_of_other_positions_are_seen(greedy_trace):
    order = np.random.default_rng(0).permutation(len(greedy_trace.tails))
    for tails in (greedy_trace.tails[order], np.roll(greedy_trace.tails, -1, axis=1)):
        wrong = replay(greedy_trace._replace(tails=tails), adaedl(), FAST, record=True)
        assert (wrong.record != replay(greedy_trace, adaedl(), FAST, record=True).record).any()


def test_the_greedy_texts_have_both_phases_and_other_phases_are_seen(greedy_trace):
    phases_there = phase_path(greedy_trace, **WATCH)
    seen = [np.mean(phases_there[row, : greedy_trace.length[row]]) for row in range(len(PROMPTS))]
    assert 0.1 < np.mean(seen) < 0.9
    policy = find_factory("policy", "phase_length")()
    both = phases_there, 1 - phases_there
    rounds = [replay(greedy_trace, policy, record=True, phases=each).record for each in both]
    assert (rounds[0] != rounds[1]).any()
    with pytest.raises(ValueError, match="reads phases"):
        replay(greedy_trace, policy)
    with pytest.raises(ValueError, match="phases of another trace"):
        replay(greedy_trace, policy, phases=phases_there[:-1])


def test_rules_read_the_recorded_warp(greedy_trace):
    np.testing.assert_allclose(greedy_trace.truncation, [list(TRUNCATED.values())] * len(PROMPTS))
    longest = lambda context: jnp.where(context.warp.top_p < 1, 4, 1)  # noqa: E731
    rule = static().replace(proceed=lambda state, seen, token, drafted, context: (drafted < longest(context), state))
    found = replay(greedy_trace, rule)
    assert found.drafted.sum() > 2 * found.rounds.sum()
    off = replay(greedy_trace._replace(truncation=greedy_trace.truncation * 0 + np.float32([0, 1, 0])), rule)
    assert 0 < off.drafted.sum() <= off.rounds.sum()
    with pytest.raises(ValueError, match="the warp's top_p, which a trace does not hold"):
        replay(greedy_trace._replace(truncation=None), rule)


def test_a_rule_that_joins_rows_is_not_replayed(greedy_trace):
    for policy in (survival(together=True), update_every(policy=survival(together=True))):
        with pytest.raises(ValueError, match="decides for the rows of a batch together"):
            replay(greedy_trace, policy)


SAMPLED = {
    "survival": (survival(), {"drafter_cost": 0.2}),
    "adaedl": (adaedl(), FAST | {"threshold": 0.2}),
    "adaedl fixed": (adaedl(), {"step": 0.0, "threshold": 0.45}),
    "adaedl keep": (adaedl(keep_checked_token=True), FAST),
    "static": (static(), {"draft_length": 4}),
    "draft and verify": (draft_and_verify(), {"threshold": 0.5, "step": 0.3}),  # reads the drawn token's probability
    "phase length": (phase_length(), {"routine_length": 6, "reasoning_length": 1}),
}


@pytest.fixture(scope="module")
def sampled_trace():
    return trace_of([[1, 2]] * 2000, limit=24, temperature=0.9, seed=100_000)


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("rule", SAMPLED)
def test_sampled_rounds_have_the_live_distribution(rule, sampled_trace):
    """2,000 live texts against 2,000 replayed ones; a trace whose acceptance ignores the text's token is seen."""
    policy, hyperparameters = SAMPLED[rule]
    state = live(policy, [[1, 2]] * 2000, hyperparameters, limit=24, temperature=0.9)
    watched = phase_path(sampled_trace, **WATCH)
    assert gap(state, replay(sampled_trace, policy, hyperparameters, phases=watched)) < 4
    # the negative control: acceptance drawn with the mean chance, whatever token the text took
    coin = np.random.default_rng(0).uniform(size=sampled_trace.overlap.shape)
    independent = sampled_trace._replace(accepted=sampled_trace.accepted & (coin < 0.9))
    assert gap(state, replay(independent, policy, hyperparameters, phases=watched)) > 6


def test_raw_entropies_are_the_tables_own(greedy_trace):
    """In plain numpy: the distribution after the tokens a, b is entry [a, b] of the table. Phases go by these."""
    other = greedy_trace._replace(target_entropy=greedy_trace.target_entropy + 1)
    phases_of = [phase_path(trace, raw, **WATCH) for raw in (True, False) for trace in (greedy_trace, other)]
    assert (phases_of[0] == phases_of[1]).all() and (phases_of[2] != phases_of[3]).any()
    logits = np.asarray(PARAMS[0], np.float64)
    distribution = np.exp(logits - logits.max(axis=-1, keepdims=True))
    distribution /= distribution.sum(axis=-1, keepdims=True)
    entropy = -np.sum(distribution * np.log(distribution), axis=-1)
    for row in range(5):
        length = int(greedy_trace.length[row])
        tokens = np.array([*PROMPTS[row], *greedy_trace.tokens[row, :length]])
        raw = greedy_trace.raw_target_entropy[row, : length + 1]
        np.testing.assert_allclose(raw, entropy[tokens[:-1], tokens[1:]], atol=1e-5)


def test_many_settings_are_each_replayed_as_alone(greedy_trace):
    thresholds = [0.1, 0.5, 0.9]
    together = replay(greedy_trace, adaedl(), FAST | {"threshold": np.array(thresholds)}, max_draft_length=4)
    assert len({int(total) for total in together.drafted.sum(axis=1)}) == 3
    for index, threshold in enumerate(thresholds):
        alone = replay(greedy_trace, adaedl(), FAST | {"threshold": threshold}, max_draft_length=4)
        for name in ("rounds", "drafted", "accepted", "passes", "discarded", "by_length"):
            np.testing.assert_array_equal(getattr(together, name)[index], getattr(alone, name)[0])


test_what_cannot_be_replayed_is_refused = refusals(
    ({"max_draft_length": 7}, "max_draft_length.*6.*7"),
    ({"hyperparameters": {"threshold": np.zeros(2), "step": np.zeros(3)}}, "2, 3"),
    ({"hyperparameters": {"threshold": 2.0}}, "threshold.*2"),
    by=lambda options, greedy_trace: replay(greedy_trace, adaedl(), **options),
)


def test_the_oracle_is_the_best_of_all_drafts(greedy_trace):
    """By brute force over one text: no sequence of draft lengths spends less at a free verification."""
    found = oracle(greedy_trace, 4)
    assert (found.drafted == found.passes).all() and found.discarded.sum() == 0
    costs = flat(0.1, 4)
    for text in (0, 7, 13):
        bits, length = greedy_trace.accepted[text], int(greedy_trace.length[text])
        best = np.full(length + 1, np.inf)
        best[length] = 0.0
        for at in range(length - 1, -1, -1):
            for drafts in range(min(4, LIMIT - at - 1) + 1):
                taken = int(np.argmin(np.append(bits[at : at + drafts], False)))
                best[at] = min(best[at], 1 + 0.1 * drafts + best[min(at + taken + 1, length)])
        np.testing.assert_allclose(found.seconds(costs)[0, text], best[0])


def test_time_is_counted_by_width():
    costs = cost_model(0.5, {2: 10.0, 4: 11.0, 7: 9.0}, plain_pass=8.0)
    np.testing.assert_array_equal(costs.pass_times(6), [10, 10, 11, 11, 11, 11, 11])  # never cheaper than narrower
    counts = np.zeros((1, 1, 7), np.int64)
    counts[0, 0, [0, 1, 3]] = (2, 1, 4)
    ones = np.ones((1, 1), np.int64)
    found = Replay(7 * ones, 20 * ones, 13 * ones, 13 * ones, 15 * ones, 2 * ones, counts, None)
    assert found.seconds(costs)[0, 0] == 3 * 10 + 4 * 11 + 15 * 0.5
    assert found.total_speedup(costs)[0] == 20 * 8 / (74 + 7.5)
    with pytest.raises(ValueError, match="widest pass is 7.*7 drafts"):
        costs.pass_times(7)


# What a trace does not hold


def by_check(question):
    return static().replace(check=lambda state, distribution, drafted, context: (question(distribution), state))


def by_update(length):
    return static().replace(
        update=lambda state, draft, result: state._replace(draft_length=length(draft, result) + 0 * draft.length)
    )


UNREADABLE = {
    "the probabilities of all tokens": by_check(lambda seen: jnp.sum(jnp.exp(2 * seen.log_prob), axis=-1) > 0.2),
    "the probabilities of all tokens (log_prob; ": by_check(lambda seen: seen.log_prob[:, 0] < -1),
    "the raw probabilities of all tokens": by_check(lambda seen: jnp.exp(seen.raw_log_prob).max(axis=-1) > 0.2),
    "which token is the most probable": by_check(lambda seen: jnp.where(seen.top_token == 2, True, False)),
    "which token was drawn": static().replace(proceed=lambda state, seen, token, *more: (token != 3, state)),
    "the drafted tokens": by_update(lambda draft, result: draft.tokens[:, 0]),
    "the emitted tokens": by_update(lambda draft, result: jnp.max(result.tokens, axis=1)),
    "the distributions that drafts were drawn from": by_update(lambda draft, result: draft.log_q.shape[1]),
    "the monitor's entropy": static().replace(begin=lambda state, context: (context.monitor.entropy > 1, state)),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_rule_that_reads_more_than_a_trace_holds_is_refused(what, greedy_trace):
    with pytest.raises(ValueError, match="this rule reads .*, which a trace does not hold") as refused:
        replay(greedy_trace, UNREADABLE[what])
    assert what in str(refused.value)
