"""Drafters that sat out and come back: their caches hold what one pass over the text writes, without a hole.

With real, tiny models in float32: a table of logits would not do, because it reads a row's last two tokens, which every
drafter pass feeds again. `drafters.model` by itself is in test_state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama

from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters import model, prompt_lookup
from specdec_jax.drafters import multi_drafter as multi_drafter
from specdec_jax.stopping import static
from specdec_jax.verification import rejection

MOST, NEW = 3, [36, 36, 9]
PROMPTS = [[7, 3, 9], list(range(3, 20)), [5, 9, 2, 2, 60, 1]]  # the second takes more than four passes of catching up
WORSE, TARGET = 1, 2  # places among the drafters, behind a lookup


def play(decoder, weights, state):
    """Every state of a generation from its prompt on, copied before the next round takes its buffers."""
    states = [jax.tree.map(np.array, state)]
    while not states[-1].done.all():
        state = decoder.run(weights, state, rounds=1)
        states.append(jax.tree.map(np.array, state))
    return states


@pytest.fixture(scope="module")
def played():
    """The rounds of three rows, one of them greedy, and of conversations that go on from there: longer, forked, alike.

    The last drafter is the target itself. Gives the model, the drafters' parameters, and both lists of states.
    """
    llama, target, worse = tiny_llama.noisy_pair(tiny_llama.variant(max_position_embeddings=128))
    params = (None, worse, target)
    joined = multi_drafter([prompt_lookup(MOST), *[model(llama, MOST, catch_up=4)] * 2], drift=0.5, prior=8.0)
    decoder = build_decoder(llama, joined, static(), rejection(), verification_widths=(4,), prefill_chunk=8)
    weights = ModelParams(target, params)
    options = {
        "max_new_tokens": NEW, "warp": make_warp(3, [0.0, 1.0, 0.8], top_k=[0, 0, 9]), "slots": 96, "seed": 3,
        "record_rounds": max(NEW), "policy_hyperparameters": {"draft_length": MOST}, "stop_ids": (),
    }  # fmt: skip
    with jax.default_matmul_precision("highest"):
        first = play(decoder, weights, decoder.prefill(weights, PROMPTS, **options))
        texts = [row[:length].tolist() for row, length in zip(first[-1].tokens, first[-1].length, strict=True)]
        prompts = [[*texts[0], 8, 1, 30, 4, 4, 4], [*texts[1][:9], 2], [*texts[2], 11]]
        given = jax.tree.map(jnp.asarray, first[-1])
        second = play(decoder, weights, decoder.extend(weights, given, prompts, **options))
        yield llama, params, (first, second)


def test_every_drafter_is_told_of_the_prompt_and_who_drafted_of_what_was_accepted(played):
    for first, *later in played[2]:
        np.testing.assert_array_equal(first.drafter.informed, np.tile(first.length[:, None], 3))
        for index in (WORSE, TARGET):
            assert (first.drafter.states[index].valid >= first.length - 2).all()
        for state in (first, *later):
            rows, last = np.arange(3), state.statistics.num_rounds - 1
            drafted, who = state.record.drafted[rows, last] > 0, state.record.drafter_id[rows, last]
            np.testing.assert_array_equal(state.drafter.informed[rows, who][drafted], state.length[drafted])


@pytest.mark.parametrize("index", [WORSE, TARGET])
def test_a_cache_is_one_pass_over_the_text(played, index):
    """After the prompt and every round: drafts rejected and accepted whole, rounds sat out, and a text that goes on."""
    llama, params, conversations = played
    for states in conversations:
        for state in states:
            drafter, known = state.drafter.states[index], state.drafter.informed[:, index]
            assert (known - 2 <= drafter.valid).all() and (drafter.valid <= state.length - 1).all()
            tiny_llama.assert_filled(llama, params[index], drafter, states[-1].tokens)


def test_the_target_as_a_drafter_is_accepted_whole_whenever_it_comes_back(played):
    for *_, last in played[2]:
        for row in range(3):
            rounds = int(last.statistics.num_rounds[row])
            who = last.record.drafter_id[row, :rounds]
            drafted, accepted = last.record.drafted[row, :rounds], last.record.accepted[row, :rounds]
            np.testing.assert_array_equal(accepted[who == TARGET], drafted[who == TARGET])
            assert row == 2 or np.sum((who[1:] == TARGET) & (who[:-1] != TARGET)) >= 2, "it must have sat out"


def test_a_rule_that_drafts_nothing_feeds_nobody(played):
    """Whoever is chosen: rounds without drafts cost no drafter pass, and nothing that was fed is lost."""
    llama, params, _ = played
    joined = multi_drafter([model(llama, MOST, catch_up=4)] * 2, drift=0.5)
    decoder = build_decoder(llama, joined, static(), rejection(), verification_widths=(4,), prefill_chunk=8)
    weights = ModelParams(params[TARGET], params[1:])
    options = {"max_new_tokens": 9, "slots": 96, "policy_hyperparameters": {"draft_length": 0}, "stop_ids": ()}
    with jax.default_matmul_precision("highest"):
        states = play(decoder, weights, decoder.prefill(weights, PROMPTS, **options))
    for index in range(2):
        fed = [state.drafter.states[index].valid.tolist() for state in states]
        assert fed == fed[:1] * len(states) and min(fed[0]) > 0
