"""Rows that are done give their place to other prompts: each decodes as it would alone, and the rest goes on."""

import functools

import jax
import numpy as np
import pytest
from refusals import refusals
from tiny_reading import reading_pair

from specdec_jax import ModelParams, build_decoder, make_warp
from specdec_jax.drafters import model, multi_drafter, ngram, prompt_lookup
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.monitors import phases
from specdec_jax.stopping import static, survival
from specdec_jax.verification import rejection

MOST, SLOTS, ROWS = 3, 96, 3
TABLES = toy_pair(5, 0, distance=0.9)
NEW = (5, 23, 9, 14, 4, 17)  # most tokens of each prompt
TEMPERATURES = (0.0, 1.0, 0.7, 1.0, 0.0, 1.0)


def toy(drafter, params, policy, monitor=None):
    options = {"monitor": monitor, "prefill_chunk": 4, "verification_widths": (MOST + 1,)}
    decoder = build_decoder(table_model(5), drafter, policy, rejection(), **options)
    return decoder, ModelParams(TABLES.target, params), 5


def reading():
    target, params, drafter, own = reading_pair()
    decoder = build_decoder(target, drafter_of(drafter, MOST), static(), rejection(), verification_widths=(MOST + 1,))
    return decoder, ModelParams(params, own), target.spec.vocab_size


def several():
    small = model(table_model(5), MOST, catch_up=4)
    joined = multi_drafter([small, ngram(MOST, slots=64), prompt_lookup(MOST)])
    return toy(joined, (TABLES.drafter, None, None), static(), phases())


CASES = {
    "survival": lambda: toy(model(table_model(5), MOST, catch_up=4), TABLES.drafter, survival()),
    "several_drafters": several,
    "reading": reading,
}


@functools.cache
def case(name):
    return CASES[name]()


def prompts_of(vocab):
    rng = np.random.default_rng(4)
    return [rng.integers(0, vocab, rng.integers(1, 12)).tolist() for _ in NEW]


def options_of(which):
    """Prefill's options for the prompts of these numbers."""
    return {
        "max_new_tokens": [NEW[i] for i in which],
        "seed": [10 + i for i in which],
        "warp": make_warp(len(which), temperature=np.array([TEMPERATURES[i] for i in which])),
        "stop_ids": (),
    }


def tokens_of(state, row):
    state = jax.tree.map(np.asarray, state)
    return state.tokens[row, : state.length[row]].tolist()


def rest_of(state, row):
    """A row's counts, and what policy and monitor think of its text."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[row], (state.statistics, state.policy, state.monitor))


def decoded_alone(name, number):
    decoder, params, vocab = case(name)
    state = decoder.prefill(params, [prompts_of(vocab)[number]], slots=SLOTS, **options_of([number]))
    state = jax.tree.map(np.asarray, decoder.run(params, state))
    return tokens_of(state, 0), rest_of(state, 0)


def decoded(name, together):
    """{number of a prompt: (tokens, `rest_of`)}, refilled whenever `together` rows are done."""
    decoder, params, vocab = case(name)
    prompts, waiting, found = prompts_of(vocab), list(range(len(NEW))), {}
    state = decoder.idle(params, ROWS, SLOTS, stop_ids=())
    holds = [None] * ROWS
    while waiting or any(number is not None for number in holds):
        for row in range(ROWS):
            if waiting and holds[row] is None:
                holds[row] = waiting.pop(0)
                options = options_of([holds[row]])
                state = decoder.refill(params, state, row, prompts[holds[row]], **options)
        idle = sum(number is None for number in holds)
        state = decoder.run(params, state, leave=idle + together)
        for row in np.flatnonzero(np.asarray(state.done)):
            if holds[row] is not None:
                found[holds[row]], holds[row] = (tokens_of(state, row), rest_of(state, row)), None
    return found


@pytest.mark.often(1)
@pytest.mark.optimised  # without, policies differ by a rounding between one row and three
@pytest.mark.parametrize("name", CASES)
def test_every_row_decodes_as_it_does_alone(name):
    """Tokens, every count, and the states of policy and monitor: nothing is left of who had the row before, and nothing
    of the neighbours."""
    alone = [decoded_alone(name, number) for number in range(len(NEW))]
    assert len({len(tokens) for tokens, _ in alone}) > 3, "rows end at different times"
    for together in (1, 2):
        found = decoded(name, together)
        for number, (tokens, rest) in enumerate(alone):
            assert found[number][0] == tokens
            jax.tree.map(np.testing.assert_array_equal, found[number][1], rest)


@pytest.mark.parametrize("name", CASES)
def test_every_array_of_a_state_has_a_row_for_each_row(name):
    """Refilling puts rows in place of rows: an array without that axis would be overwritten for all."""
    decoder, params, _ = case(name)
    for leaf in jax.tree.leaves(decoder.idle(params, 5, SLOTS)):
        assert leaf.shape[0] == 5


def test_a_run_leaves_when_so_many_rows_are_done():
    decoder, params, vocab = case("survival")
    for leave in (1, 2, 3, 9):
        state = decoder.prefill(params, prompts_of(vocab)[:3], slots=SLOTS, **options_of([0, 1, 2]))
        done = np.asarray(decoder.run(params, state, leave=leave).done)
        assert done.sum() == min(leave, 3), "their ends are rounds apart"
        assert done[0]


def refilled(row, record_rounds=0, **options):
    decoder, params, _ = case("survival")
    return decoder.refill(params, decoder.idle(params, ROWS, SLOTS, record_rounds=record_rounds), row, [1], **options)


def left_with(count):
    decoder, params, _ = case("survival")
    return decoder.run(params, decoder.idle(params, ROWS, SLOTS), leave=count)


test_what_is_refused = refusals(
    (lambda: refilled(3), r"row in \[0, 3\), got 3"),
    (lambda: refilled(-1), r"row in \[0, 3\), got -1"),
    (lambda: refilled(0, stop_ids=[0] * 9), "room for 8 stop_ids a row, the prompt's take 16"),
    (lambda: refilled(0, record_rounds=4), "keeps no record"),
    (lambda: left_with(0), "leaves when 1 or more"),
)
