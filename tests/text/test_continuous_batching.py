"""Rows take the next request as theirs ends; what a request gets is what it gets alone."""

import jax
import numpy as np
import pytest

from specdec_jax.stopping import static, survival
from specdec_jax.text import continuous_batching
from specdec_jax.text.continuous_batching import FEWEST_SLOTS, cache_bytes, complete, size_of
from specdec_jax.text.generation import generate, prepare
from specdec_jax.text.sampling_params import SamplingParams

NEW = (5, 40, 1, 17, 9, 23, 12, 60, 3)
EVERY = range(len(NEW))


@pytest.fixture(scope="module")
def tiny(tiny):
    return tiny.using(policy=survival())


def prompt_of(number):
    return "".join("abcdefgh"[i] for i in np.random.default_rng(number).integers(0, 8, 3 + 5 * number))


def sampling_of(number, stop=()):
    temperature, top_k = (0.0, 1.0, 0.7)[number % 3], 5 * (number % 2)
    return SamplingParams(max_new_tokens=NEW[number], temperature=temperature, top_k=top_k, seed=number, stop=stop)


def decoded(pair, number, stop=()):
    return generate(prompt_of(number), sampling_of(number, stop), pair=pair, chat=False, slots=FEWEST_SLOTS)


@pytest.fixture(scope="module")
def stops(tiny):
    """A stop string for two of the requests, from the middle of their texts."""
    return {number: decoded(tiny, number).text[NEW[number] // 3] for number in (3, 7)}


@pytest.fixture(scope="module")
def alone(tiny, stops):
    return [decoded(tiny, number, stops.get(number, ())) for number in range(len(NEW))]


def requests(pair, stops=None, numbers=EVERY):
    samplings = [(number, sampling_of(number, (stops or {}).get(number, ()))) for number in numbers]
    return [prepare(pair, [prompt_of(number)], sampling, chat=False) for number, sampling in samplings]


def by_index(results):
    return {done.index: done.result for done in results}


@pytest.mark.often(1)
@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_every_request_gets_what_it_gets_alone(tiny, stops, alone, batch):
    found = by_index(complete(tiny, requests(tiny, stops), batch))
    assert sorted(found) == list(range(len(NEW)))
    for number, result in found.items():
        expected = alone[number]
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
        assert result.prompt_tokens == expected.prompt_tokens
        if number not in stops:
            assert result.tokens == expected.tokens and result.statistics == expected.statistics
    assert {result.finish_reason for result in found.values()} >= {"length", "stop_string"}


def test_statistics_of_a_stopped_text_do_not_depend_on_the_batch(tiny, stops):
    """A row with a stop string is looked at every round, so no neighbour lets it run on."""
    by_batch = [by_index(complete(tiny, requests(tiny, stops), batch)) for batch in (1, 2)]
    for number in stops:
        one, other = (found[number] for found in by_batch)
        assert one.tokens == other.tokens and one.statistics == other.statistics


def test_short_requests_overtake_a_long_one_by_so_many_at_most(tiny):
    numbers = [7, *[2, 8, 0] * 6]
    order = [done.index for done in complete(tiny, requests(tiny, numbers=numbers), 2, look_ahead=5)]
    assert sorted(order) == list(range(len(numbers)))
    assert 3 <= order.index(0) <= 5, "they pass it, but five requests are all that may be begun before it is done"


def test_requests_of_one_size_share_a_program(tiny):
    """Two sizes of cache slots are two compiled generations, however many requests there are; small ones fill up."""
    pair = tiny.using(policy=static())
    long = [prepare(pair, ["a" * 118], SamplingParams(max_new_tokens=new), chat=False) for new in (8, 10, 9)]
    mixed = [long[0], *requests(pair, numbers=(0, 1, 2)), *long[1:], *requests(pair, numbers=(4, 5))]
    assert {size_of(pair, one).slots for one in mixed} == {FEWEST_SLOTS, 3 * FEWEST_SLOTS // 2}
    before = pair.decoder.num_programs("run")  # of other tests' pairs, which share the decoder
    found = by_index(complete(pair, mixed, 2))
    assert sorted(found) == list(range(len(mixed)))
    assert pair.decoder.num_programs("run") <= before + 2


def test_requests_are_taken_as_rows_fall_free(tiny):
    taken = []

    def source():
        for number, one in enumerate(requests(tiny)):
            taken.append(number)
            yield one

    results = complete(tiny, source(), 2, look_ahead=3)
    next(results)
    assert max(taken) <= 3


@pytest.mark.parametrize("options", [{"batch": 0}, {"look_ahead": 0}])
def test_numbers_below_one_are_refused(tiny, options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must lie in"):
        list(complete(tiny, [], **options))
    assert list(complete(tiny, [])) == []


def test_as_many_rows_as_fit_are_decoded_at_once(tiny, monkeypatch):
    """And one more is left free, for the prefill; where not one fits, that is said before anything compiles."""
    one = cache_bytes(tiny, 1, FEWEST_SLOTS)
    state = tiny.decoder.idle(tiny.params, 2, FEWEST_SLOTS)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state.target_cache, state.drafter)))
    assert held == cache_bytes(tiny, 2, FEWEST_SLOTS) == pytest.approx(2 * one, rel=0.01)
    monkeypatch.setattr(continuous_batching, "free_memory", lambda: 3 * one)
    found = list(complete(tiny, requests(tiny), 64))
    assert len(found) == len(NEW) and {done.rows for done in found} == {2}
    monkeypatch.setattr(continuous_batching, "free_memory", lambda: one)
    monkeypatch.setattr(continuous_batching, "_one_shape", None)  # nothing is begun
    with pytest.raises(ValueError, match=f"{FEWEST_SLOTS} cache slots take .* GB a row.* GB are free"):
        list(complete(tiny, requests(tiny), 1))
