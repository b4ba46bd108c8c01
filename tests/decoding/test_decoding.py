"""The jitted loops against a plain Python twin: the same tokens, rounds and counts; ends of all kinds."""

import functools

import jax
import numpy as np
import plain_oracles as oracles
import pytest
import stopping_oracles as twins
from rules import FAST, counting

from specdec_jax import ModelParams, make_warp, summarise
from specdec_jax.decoding import sampling
from specdec_jax.decoding.state import padded_rows
from specdec_jax.lossless import toy_decoder
from specdec_jax.lossless.toys import toy_pair
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.verification import block, greedy, rejection

K, NEW = 3, 24
pytestmark = pytest.mark.widths
HYPERPARAMETERS = {**FAST, "entropy_factor": 0.1}
TWIN_FAST = {"gamma": 0.1, "epsilon": 0.5, "beta2": 0.2, "threshold": 0.6}
POLICIES = {
    "static": (static, {"draft_length": 3}, lambda: twins.Length(3)),
    "static_2": (static, {"draft_length": 2}, lambda: twins.Length(2)),
    "adaedl": (adaedl, HYPERPARAMETERS, lambda: twins.AdaEDL(**TWIN_FAST)),
    "adaedl_keep": (lambda: adaedl(True), HYPERPARAMETERS, lambda: twins.AdaEDL(**TWIN_FAST, keep=True)),
    "at_least": (lambda: at_least(2, adaedl()), HYPERPARAMETERS, lambda: twins.AtLeast(2, twins.AdaEDL(**TWIN_FAST))),
    "at_least_keep": (
        lambda: at_least(2, adaedl(True)),
        HYPERPARAMETERS,
        lambda: twins.AtLeast(2, twins.AdaEDL(**TWIN_FAST, keep=True)),
    ),
}
VERIFIERS = {"rejection": rejection, "block": block, "greedy": greedy}


@functools.cache
def decoder_of(policy, verifier, vocab=5):
    return toy_decoder(POLICIES[policy][0](), VERIFIERS[verifier](), K, vocab)[0]


@functools.cache
def uniform_table(prompt, seed):
    """uniform[emitted, position, role] of one request, by its key: the hash of its prompt, and its seed."""
    emitted, position = (grid.ravel().astype(np.int32) for grid in np.mgrid[0 : NEW + 1, 0 : K + 1])
    keys = np.tile(
        np.array([*sampling.prompt_hashes(padded_rows("prompt", [prompt], 99)), seed], np.uint32), (len(emitted), 1)
    )
    roles = [np.asarray(sampling.uniforms(keys, emitted, position, role), np.float64) for role in range(3)]
    return np.stack(roles, axis=-1).reshape(NEW + 1, K + 1, 3)


def logits_of(table):
    return lambda text: table[text[-2] if len(text) > 1 else 0, text[-1]].astype(np.float64)


def assert_as_twin(policy, verifier, prompts, *, pair=None, numbers=None, new_tokens=NEW, seed=3, stop_ids=()):
    """Runs the decoder and the twin and compares everything they both know; returns the final state.

    Each of `numbers` is one for all rows, or a list of one a row.
    """
    pair = toy_pair(5, 0, distance=0.9) if pair is None else pair
    numbers = {"temperature": 1.0} if numbers is None else numbers
    decoder, params = decoder_of(policy, verifier, pair.target.shape[0]), ModelParams(*pair[:2])
    limits = np.broadcast_to(new_tokens, len(prompts)).tolist()
    state = decoder.prefill(
        params,
        prompts,
        max_new_tokens=limits,
        seed=seed,
        warp=make_warp(len(prompts), **numbers),
        policy_hyperparameters=POLICIES[policy][1],
        stop_ids=stop_ids,
        record_rounds=NEW,
        slots=64,
    )
    state = jax.tree.map(np.asarray, decoder.run(params, state))
    assert state.done.all()
    assert (state.target_cache.length == state.length - 1).all(), "the target's cache holds every token but the last"
    played = []
    for row, prompt in enumerate(prompts):
        table, rule = uniform_table(tuple(prompt), seed + row), POLICIES[policy][2]()
        text, rounds = oracles.decode(
            *map(logits_of, pair[:2]),
            prompt,
            rule=rule,
            verifier=verifier,
            most=K,
            new_tokens=limits[row],
            uniform=lambda *where, t=table: t[where],
            numbers={name: np.broadcast_to(value, len(prompts))[row].item() for name, value in numbers.items()},
            stop_ids=stop_ids,
        )
        assert state.tokens[row, : state.length[row]].tolist() == text
        assert_same_rounds(state, row, rounds)
        assert_same_counts(state, row, rounds)
        played += rounds
        shown = POLICIES[policy][0]().threshold(state.policy)
        np.testing.assert_allclose(shown[row], rule.shown(), rtol=1e-4, atol=1e-6)
    total = {key: sum(turn[key] for turn in played) for key in ("drafted", "emitted", "passes")}
    drafts = sum(turn["drafted"] > 0 for turn in played)
    expected = {
        "mean_draft_length": total["drafted"] / drafts if drafts else None,
        "tokens_per_round": total["emitted"] / len(played),
        "discarded_fraction": 1 - total["drafted"] / total["passes"] if total["passes"] else None,
    }
    figures = summarise(state.statistics)
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    return state


def assert_same_rounds(state, row, rounds):
    record = jax.tree.map(lambda leaf: leaf[row], state.record)
    for name, key in [("drafted", "drafted"), ("accepted", "accepted"), ("emitted", "emitted")]:
        padded = [turn[key] for turn in rounds] + [0] * (NEW - len(rounds))
        assert getattr(record, name).tolist() == padded, name
    for index, turn in enumerate(rounds):
        assert record.proposed[index, : turn["drafted"]].tolist() == turn["proposed"]
        assert record.drafter_passes[index] == turn["passes"]
        assert record.discarded[index] == turn["passes"] - turn["drafted"]
        for name in ("entropy", "max_prob"):
            expected = [*turn[name], *[np.nan] * (K - turn["passes"])]
            np.testing.assert_allclose(getattr(record, name)[index], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        assert record.width[index] >= turn["drafted"] + 1
        np.testing.assert_allclose(record.threshold[index], turn["shown"], rtol=1e-4)


def assert_same_counts(state, row, rounds):
    counts = jax.tree.map(lambda leaf: leaf[row], state.statistics)
    total = lambda key: sum(turn[key] for turn in rounds)  # noqa: E731
    assert counts.num_rounds == len(rounds)
    assert counts.num_drafts == sum(turn["drafted"] > 0 for turn in rounds)
    assert counts.num_draft_tokens == total("drafted")
    assert counts.num_accepted_tokens == total("accepted")
    assert counts.num_emitted_tokens == total("emitted") == state.length[row] - state.prompt_length[row]
    assert counts.drafter_passes == total("passes")
    assert counts.discarded_passes == total("passes") - total("drafted")
    for k in range(K):
        drafted = [turn for turn in rounds if turn["drafted"] > k]
        assert counts.drafted_at[k] == len(drafted)
        # A text that ended evaluates nothing.
        assert counts.evaluated_at[k] == sum(turn["emitted"] > k for turn in drafted)
        assert counts.accepted_at[k] == sum(turn["accepted"] > k for turn in drafted)
    histogram = [sum(turn["accepted"] == k for turn in rounds) for k in range(K + 1)]
    assert counts.length_histogram.tolist() == histogram and sum(histogram) == len(rounds)


RAGGED = [[1, 2, 3], [4], [0, 0, 3, 1, 2, 4, 4, 1, 0, 2, 3], [2, 2]]
WARPS = [
    {"temperature": 0.0},
    {"temperature": [1.0, 0.0, 0.7, 0.0], "top_k": [0, 3, 0, 0]},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.often(4)
@pytest.mark.parametrize(
    "policy, verifier",
    [
        ("static", "rejection"),
        ("static", "greedy"),
        ("adaedl", "rejection"),
        ("adaedl_keep", "block"),
        ("static", "block"),
        ("adaedl", "block"),
        ("at_least", "rejection"),
        ("at_least_keep", "block"),
    ],
)
def test_the_loop_is_the_twin(policy, verifier):
    warps = WARPS[:1] if verifier == "greedy" else WARPS
    states = [assert_as_twin(policy, verifier, RAGGED, numbers=numbers) for numbers in warps]
    accepted, drafted, discarded = (
        sum(int(getattr(state.statistics, name).sum()) for state in states)
        for name in ("num_accepted_tokens", "num_draft_tokens", "discarded_passes")
    )
    assert 10 < accepted < drafted - 10, "little was at stake"
    assert (discarded > 0) == (policy in ("adaedl", "at_least"))


def test_a_rules_state_changes_by_its_own_row_alone():
    """Rows that stopped, were cut by the budget or are finished keep their state while others go on."""
    decoder, params = toy_decoder(counting(), rejection(), K, 5)
    options = {"max_new_tokens": [24, 24, 5, 11, 0], "policy_hyperparameters": {"length": [2, 1, 0, 3, 1]}, "slots": 64}
    prompts = [*RAGGED, [1]]
    state = decoder.run(params, decoder.prefill(params, prompts, warp=make_warp(5, 1.0), **options))
    counts, seen = state.statistics, state.policy
    np.testing.assert_array_equal(seen.begins, counts.num_rounds)
    np.testing.assert_array_equal(seen.updates, counts.num_rounds)
    np.testing.assert_array_equal(seen.checks, counts.drafter_passes)
    np.testing.assert_array_equal(seen.proceeds, counts.num_draft_tokens)
    assert np.asarray(seen.begins)[[2, 4]].tolist() == [5, 0] and int(counts.discarded_passes[1]) > 0


# Ends


def chain_pair(vocab=40, wrong=(7, 8, 15)):
    """Greedily token a is followed by a + 1, so every position has its own token; the drafter errs after some."""
    after = np.arange(vocab) + 1
    target, drafter = np.zeros((2, vocab, vocab, vocab), np.float32)
    target[:, np.arange(vocab), after % vocab] = 8.0
    after[list(wrong)] += 5
    drafter[:, np.arange(vocab), after % vocab] = 8.0
    return type(toy_pair())(target, drafter)


@pytest.mark.parametrize("stops", [*((stop, stop) for stop in (4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 39)), (6, 5)])
def test_a_stop_token_anywhere_ends_the_text_after_it(stops):
    """First token, inside accepted drafts, a recovered and a bonus token, or never; rows end at different times."""
    prompts = [[3], [1, 2], [9], [14, 15], [20]]
    options = {"pair": chain_pair(), "numbers": WARPS[0], "stop_ids": stops, "new_tokens": 14}
    state = assert_as_twin("static", "rejection", prompts, **options)
    for row, prompt in enumerate(prompts):
        new = state.tokens[row, len(prompt) : state.length[row]].tolist()
        reach = min((stop - prompt[-1] - 1) % 40 + 1 for stop in stops)  # its last token ends no text
        assert len(new) == min(reach, 14) and not {*stops} & {*new[:-1]}


@pytest.mark.parametrize(
    "policy, verifier", [("static", "rejection"), ("adaedl", "rejection"), ("adaedl_keep", "block")]
)
def test_limits_of_0_1_2_and_more_tokens_in_one_batch(policy, verifier):
    state = assert_as_twin(policy, verifier, RAGGED, new_tokens=[0, 1, 2, NEW])
    assert (state.length - state.prompt_length).tolist() == [0, 1, 2, NEW]
    assert (state.statistics.num_draft_tokens[:2] == 0).all(), "a draft could not have been used"
    assert state.record.drafted[2].max() <= 1


def test_a_shorter_length_runs_in_a_narrower_width():
    assert_as_twin("static_2", "block", RAGGED)
    decoder, params = decoder_of("static_2", "block"), ModelParams(*toy_pair(5, 0)[:2])
    options = {"max_new_tokens": 8, "record_rounds": NEW, "slots": 64, "stop_ids": (), "warp": make_warp(4, 1.0)}
    for length, width in [(0, 2), (1, 2), (2, 4), (3, 4)]:
        state = decoder.prefill(params, RAGGED, policy_hyperparameters={"draft_length": length}, **options)
        assert int(decoder.run(params, state, rounds=1).record.width[0, 0]) == width


def test_figures_of_a_known_generation():
    """Of one row, whose cache is written otherwise than that of several."""
    pair = chain_pair(wrong=(8,))
    figures = summarise(
        assert_as_twin("static", "rejection", [[3]], pair=pair, numbers=WARPS[0], new_tokens=9).statistics
    )
    # 4 5 6 + bonus 7; 8 right, then 14 wrong + recovered 9; two drafts fit: 10 11 + bonus 12
    expected = {
        "num_rounds": 3,
        "num_drafts": 3,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 6,
        "num_emitted_tokens": 9,
        "draft_acceptance_rate": 6 / 8,
        "mean_acceptance_length": 3.0,
        "acceptance_per_position": [3 / 3, 2 / 3, 1 / 3],
        "conditional_acceptance_per_position": [1.0, 2 / 3, 1.0],
        "acceptance_histogram": [0, 1, 1, 1],
    }
    assert {name: figures[name] for name in expected} == expected
