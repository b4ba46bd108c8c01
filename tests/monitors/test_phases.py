"""Routine and reasoning phases: the detector against a plain loop, inside the decoder, and what reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from refusals import refusals
from stopping_cases import play_rows, story
from tiny_pair import write_pair

from specdec_jax import lossless
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters import model
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.monitors import phases
from specdec_jax.monitors.phases import observe_token
from specdec_jax.stopping import adaedl, phase_length, static
from specdec_jax.text.generation import build_pair
from specdec_jax.types import RoundContext, VerificationResult
from specdec_jax.verification import rejection

HYPERPARAMETERS = {"enter": 1.0, "leave": 0.7, "minimum_length": 3, "decay": 0.6}


def phases_by_hand(entropies, enter, leave, minimum_length, decay):
    """The phase after each token, written as one would say it."""
    phase, running, lasted, found = 0, 0.0, 0, []
    for n, entropy in enumerate(entropies):
        weight = max(1 - decay, 1 / (n + 1))
        running = (1 - weight) * running + weight * entropy
        lasted += 1
        if lasted >= minimum_length and (running > enter if phase == 0 else running < leave):
            phase, lasted = 1 - phase, 0
        found.append(phase)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_detector_is_the_plain_loop(seed):
    rng = np.random.default_rng(seed)
    entropies = np.clip(np.repeat(rng.uniform(0, 2, 12), 5) + rng.normal(0, 0.2, 60), 0, None).astype(np.float32)
    state, found = phases().init(1, **HYPERPARAMETERS), []
    for entropy in entropies:
        state = observe_token(state, jnp.array([entropy]))
        found.append(int(state.phase[0]))
    assert found == phases_by_hand(entropies, **HYPERPARAMETERS)
    assert 0 < sum(found) < len(found), "both phases must occur, or nothing was tested"


@pytest.mark.parametrize("raw", [True, False])
def test_rounds_of_any_length_find_the_same_phases(raw):
    """The state after some tokens does not depend on the rounds they came in, nor on what comes after them."""
    rng, monitor, temperatures = np.random.default_rng(0), phases(raw_entropy=raw), np.array([0.6, 1.7])
    logits = rng.normal(0, 1, (2, 40, 7)) * rng.uniform(0, 4, (2, 40, 1))
    prob = np.exp(logits if raw else logits / temperatures[:, None, None])
    prob /= prob.sum(axis=-1, keepdims=True)
    entropies = -np.sum(prob * np.log(prob), axis=-1)
    whole = monitor.init(2, **HYPERPARAMETERS)
    for t in range(24):
        whole = observe_token(whole, jnp.asarray(entropies[:, t], jnp.float32))
    cut, at = monitor.init(2, **HYPERPARAMETERS), np.zeros(2, int)
    context = RoundContext(*[None] * len(RoundContext._fields))._replace(warp=make_warp(2, temperatures))
    for lengths in ([4, 1], [2, 3], [1, 4], [4, 4], [4, 3], [1, 4], [4, 1], [4, 4]):
        block = np.stack([logits[row, at[row] : at[row] + 4] for row in range(2)])
        result = VerificationResult(jnp.zeros((2, 4), jnp.int32), jnp.array(lengths, jnp.int32))
        cut, at = monitor.observe(cut, jnp.asarray(block, jnp.float32), result, context), at + lengths
    assert at.tolist() == [24, 24]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, cut)


def decode(policy, monitor=None, **hyperparameters):
    """(the toy's tables, the final state) of two rows of 40 tokens at temperature 1."""
    tables, small = toy_pair(5, 0, distance=0.9), table_model(5)
    params, drafter = ModelParams(tables.target, tables.drafter), model(small, 3, catch_up=4)
    decoder = build_decoder(small, drafter, policy, rejection(), monitor=monitor, prefill_chunk=4)
    options = {"max_new_tokens": 40, "seed": 3, "warp": make_warp(2, temperature=1.0), "stop_ids": ()}
    state = decoder.prefill(params, [(0, 1), (2, 3)], record_rounds=40, **options, **hyperparameters)
    return tables, jax.tree.map(np.asarray, decoder.run(params, state))


def expected_phases(table, state, row, hyperparameters):
    """The phase each round began in, from the emitted tokens and the target's table."""
    start, end = int(state.prompt_length[row]), int(state.length[row])
    text = state.tokens[row, :end]
    entropies = []
    for t in range(start, end):
        entropies.append(oracles.entropy(oracles.softmax(table[text[t - 2], text[t - 1]].astype(np.float64))))
    after = [0, *phases_by_hand(entropies, **hyperparameters)]
    emitted = state.record.emitted[row]
    return [after[int(emitted[:i].sum())] for i in range(int(state.statistics.num_rounds[row]))]


WATCH = {"enter": 0.9, "leave": 0.85, "minimum_length": 2, "decay": 0.5}


def test_the_record_says_which_phase_a_round_began_in():
    tables, state = decode(static(), phases(), monitor_hyperparameters=WATCH)
    seen = set()
    for row in range(2):
        wanted = expected_phases(np.asarray(tables.target), state, row, WATCH)
        assert state.record.phase[row, : len(wanted)].tolist() == wanted
        seen |= set(wanted)
        emitted = state.record.emitted[row, : len(wanted)]
        assert state.statistics.num_reasoning_tokens[row] == emitted[np.array(wanted) == 1].sum() > 0
    assert seen == {0, 1}


def test_lengths_follow_the_phase():
    lengths = {"routine_length": 3, "reasoning_length": 1}
    _, state = decode(phase_length(), phases(), monitor_hyperparameters=WATCH, policy_hyperparameters=lengths)
    for row in range(2):
        rounds = int(state.statistics.num_rounds[row]) - 1  # the last may be cut by the budget
        phase, drafted = state.record.phase[row, :rounds], state.record.drafted[row, :rounds]
        budget = 40 - np.cumsum(np.r_[0, state.record.emitted[row, : rounds - 1]]) - 1
        np.testing.assert_array_equal(drafted, np.minimum(np.where(phase == 0, 3, 1), budget))
        assert set(phase.tolist()) == {0, 1}
    watch, lengths = {"enter": 0.0, "leave": 0.0, "minimum_length": 1}, {"routine_length": 3, "reasoning_length": 0}
    _, state = decode(phase_length(), phases(), monitor_hyperparameters=watch, policy_hyperparameters=lengths)
    assert state.record.drafted[0, 1:10].tolist() == [0] * 9 and state.record.drafted[0, 0] == 3


def test_the_rule_inside_may_stop_sooner_and_is_taught():
    wide = {"routine_length": 9, "reasoning_length": 9}
    alone = {"entropy_factor": 0.1, "threshold": 0.6, "step": 0.5, "threshold_decay": 0.2}
    _, inside = decode(phase_length(adaedl()), phases(), policy_hyperparameters={**alone, **wide})
    _, outside = decode(adaedl(), policy_hyperparameters=alone)
    np.testing.assert_array_equal(inside.tokens, outside.tokens)
    np.testing.assert_array_equal(inside.record.drafted, outside.record.drafted)
    np.testing.assert_allclose(inside.policy.policy.control.threshold, outside.policy.control.threshold)


def test_the_rule_inside_plans_within_the_length_of_the_phase():
    within = lambda state, *arguments: (arguments[-1].budget <= 2, state)  # noqa: E731
    inner = static().replace(begin=within, check=within, proceed=within)
    (drafted, *_), _ = play_rows(phase_length(inner), {"routine_length": 2})
    np.testing.assert_array_equal(drafted, np.minimum(story().budgets, 2))


def test_drafting_by_phase_is_lossless_in_the_whole_decoder():
    decoder, params = lossless.toy_decoder(phase_length(), rejection(), monitor=phases())
    report = lossless.test_by_sampling(
        decoder,
        params,
        policy_hyperparameters={"routine_length": 2, "reasoning_length": 1},
        monitor_hyperparameters={"enter": 0.9, "leave": 0.9, "minimum_length": 1, "decay": 0.3},
        sequences=16_384,
    )
    assert report.lossless, report


test_what_is_refused = refusals(
    (lambda: phases().init(1, leave=2.0, enter=1.0), "leave must not exceed enter, got leave=2 and enter=1"),
    (lambda: phase_length(phase_length()), "without hyperparameters called reasoning_length and routine_length"),
    (lambda: decode(phase_length()), "this policy reads phases"),
)


def test_a_pair_gets_its_monitor(tmp_path):
    pair = build_pair(*write_pair(tmp_path), policy=phase_length(), dtype="float32")
    assert pair.decoder.parts.monitor.init(1).phase.tolist() == [0]
    assert phase_length().hyperparameters == {"routine_length": 5, "reasoning_length": 2}
