"""Beam search against beam search written as loops in Python."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals

import specdec_jax
from specdec_jax.contrib.beam_search.search import Hypothesis, _Numbers, _program, beam_search
from specdec_jax.decoding.scoring import score
from specdec_jax.models.adapters import from_logits_function
from specdec_jax.text.generation import build_pair, encode, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import ModelSpec

ROOM = 32  # slots


def small_search(table, width, ends=(), penalty=1.0, minimum=0, most=4, prompt=0):
    """The compiled search alone, on a model of a few tokens; hypotheses as (tokens, score, log_prob)."""
    model = toy(table.shape[-1])
    kept = _program(model, width)(
        jnp.asarray(table, jnp.float32),
        model.init_cache(None, 1, ROOM),
        np.int32(prompt),
        np.array(ends, np.int32),
        _Numbers(np.float32(penalty), np.int32(minimum), np.int32(most)),
        ROOM,
    )
    found = zip(kept.tokens, kept.length, kept.score, kept.log_prob, strict=True)
    return [
        (tuple(np.asarray(t)[: int(n)].tolist()), float(s), float(p)) for t, n, s, p in found if np.isfinite(float(s))
    ]


@functools.cache
def toy(vocab):
    def table_logits(params, tokens):
        """Distributions by slot, its token and the one before, [2, S, V, V]: no two paths of one length have the same
        sum, and a beam that kept another's cache would be seen.
        """
        slots, before = jnp.arange(tokens.shape[1])[None, :], jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        return params[0, slots, tokens] + params[1, slots, before]

    return from_logits_function(table_logits, ModelSpec(vocab, ROOM, ()))


def random_table(vocab, seed):
    return np.random.default_rng(seed).normal(size=(2, ROOM, vocab, vocab)).astype(np.float32)


def distribution(table, path):
    before = path[-2] if len(path) > 1 else 0
    row = (table[0, len(path) - 1, path[-1]] + table[1, len(path) - 1, before]).astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def looped_search(table, width, ends, penalty, minimum, most, prompt=0):
    """Beam search to the last step, in lists, with no early stop."""
    beams, kept = [((), 0.0)], []
    for length in range(1, most + 1):
        candidates = []
        for tokens, total in beams:
            row = distribution(table, (prompt, *tokens))
            for token in range(table.shape[-1]):
                if token not in ends or length > minimum:
                    candidates.append(((*tokens, token), total + row[token]))
        candidates.sort(key=lambda entry: -entry[1])
        for tokens, total in candidates[:width]:
            if tokens[-1] in ends or length == most:
                kept.append((tokens, total / length**penalty, total))
        beams = [entry for entry in candidates if entry[0][-1] not in ends][:width]
    return sorted(kept, key=lambda entry: -entry[1])[:width]


def same(found, expected):
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[1:], other[1:], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (3, 4.0), (3, -1.5), (4, 0.0)])
def test_few_beams_do_what_loops_do(seed, width, penalty):
    """With two ends, a minimum, and an early stop that must lose nothing."""
    table = random_table(7, seed)
    for ends, minimum in (((2,), 0), ((2, 4), 3)):
        found = small_search(table, width, ends, penalty, minimum, most=9)
        same(found, looped_search(table, width, ends, penalty, minimum, 9))


@pytest.mark.parametrize(("penalty", "most"), [(0.0, 24), (-1.0, 24), (1.0, 3)])
def test_a_search_stops_once_nothing_open_can_win(penalty, most):
    """Token 1 nearly always ends. Distributions of later slots are no numbers: were one asked for, it would show."""
    table = np.zeros((2, ROOM, 3, 3), np.float32)
    table[0, ..., 1] = 20.0
    broken = table.copy()
    broken[:, 2:] = np.nan
    found = small_search(broken, 2, (1,), penalty, most=most)
    same(found, looped_search(table, 2, (1,), penalty, 0, most))


@pytest.mark.parametrize(("penalty", "width", "winner"), [(1.0, 1, 9), (-1.0, 2, 3)])
def test_a_search_goes_on_while_something_open_can_win(penalty, width, winner):
    """The bound takes the longest text where length is favoured, and the shortest where it is not."""
    table = np.full((2, ROOM, 3, 3), -30.0, np.float32)
    table[1] = 0.0
    table[0, 0, :, :2] = np.log([0.4, 0.6]) if penalty > 0 else np.log([0.6, 0.4])  # token 1 ends
    table[0, 1:, :, 0] = 0.0
    if penalty < 0:
        table[0, 1, :, 1], table[0, 2, :, :2] = -4.0, [-9.0, 0.0]
    expected = looped_search(table, width, (1,), penalty, 0, 24 if penalty < 0 else 9)
    found = small_search(table, width, (1,), penalty, most=24 if penalty < 0 else 9)
    same(found, expected)
    assert len(found[-1][0]) == winner  # one that ended after the kept ones were full


def test_equal_candidates_go_by_beam_then_token():
    flat = np.zeros((2, ROOM, 3, 3), np.float32)
    assert [tokens for tokens, *_ in small_search(flat, 4, most=3)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    ended = [tokens for tokens, *_ in small_search(flat, 2, (0,), penalty=0.0, most=3)]
    assert ended[0] == (0,)  # of equal sums the shortest came first


def test_numbers_compile_nothing_new():
    table = random_table(5, 1)
    small_search(table, 3, (2,))
    compiled = _program(toy(5), 3).__wrapped__.programs
    small_search(table, 3, (3,), penalty=-0.5, minimum=2, most=7)
    assert _program(toy(5), 3).__wrapped__.programs == compiled


@pytest.fixture(scope="module")
def tiny(tiny_folders):
    return specdec_jax.load_model(tiny_folders[0], dtype="float32")


def test_one_beam_is_greedy_decoding(tiny):
    plain = generate("hello", SamplingParams(max_new_tokens=12), target=tiny, drafter=None, chat=False)
    found = beam_search("hello", target=tiny, width=1, chat=False, max_new_tokens=12)
    assert [beam.tokens for beam in found] == [plain.tokens]
    assert found[0].text == plain.text and found[0].finish_reason == plain.finish_reason


def test_more_beams_find_more_probable_texts_and_say_how_they_ended(tiny):
    options = {"target": tiny, "chat": False, "max_new_tokens": 10}
    one, four = (beam_search("hello", width=width, **options) for width in (1, 4))
    assert len(four) == 4 and isinstance(four[0], Hypothesis) and four[0].log_prob > one[0].log_prob
    assert [beam.score for beam in four] == sorted((beam.score for beam in four), reverse=True)
    assert all(math.isclose(beam.score, beam.log_prob / 10, rel_tol=1e-6) for beam in four)
    stop = four[0].tokens[2]
    ended = beam_search("hello", width=4, stop_ids=[stop], min_new_tokens=2, **options)
    assert any(beam.finish_reason == "stop" for beam in ended)
    for beam in ended:
        assert stop not in beam.tokens[:-1] and (beam.tokens[-1] == stop) == (beam.finish_reason == "stop")
        assert len(beam.tokens) > 2
        shown = beam.tokens[:-1] if beam.finish_reason == "stop" else beam.tokens
        assert beam.text == tiny.tokenizer.decode(shown)


def test_a_beams_probability_is_that_of_its_text_read_anew(tiny):
    """Every row's cache followed its beam: else later tokens would be judged after another beam's text."""
    tiny = tiny._replace(params=jax.tree.map(lambda leaf: leaf * 0.5, tiny.params))  # less sure of itself
    found = beam_search("a b c", target=tiny, chat=False, width=4, max_new_tokens=12)
    prompt = encode(tiny, "a b c", chat=False)
    pair = build_pair(tiny, None)
    texts = np.array([[*prompt, *beam.tokens] for beam in found])
    assert len({tuple(text[:-1]) for text in texts}) > 1  # beams that parted before their last token
    log_p = np.asarray(score(pair.decoder, pair.params, texts).log_p)[:, len(prompt) - 1 :]
    np.testing.assert_allclose([beam.log_prob for beam in found], log_p.sum(axis=1), rtol=1e-6)


test_bad_numbers_are_refused_by_name = refusals(
    ({"width": 0}, "width must lie in .1, .*got 0"),
    ({"max_new_tokens": 0}, "max_new_tokens must lie in .1, .*got 0"),
    ({"max_new_tokens": 4000}, "exceed the target's context, 128"),
    ({"prompt": ""}, "the prompt is empty"),
    by=lambda more, tiny: beam_search(**{"prompt": "x", "target": tiny, "chat": False, "max_new_tokens": 8, **more}),
)
