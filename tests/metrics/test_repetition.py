"""The detector of repeated text, on texts made for it and against a slow twin that reads like the definition."""

import numpy as np
import pytest

from specdec_jax.metrics.repetition import repeated_mask, repeated_share


def slow_mask(tokens, n):
    """The definition, word for word."""
    mask = [False] * len(tokens)
    for start in range(len(tokens) - n + 1):
        if any(tokens[start : start + n] == tokens[earlier : earlier + n] for earlier in range(start)):
            for index in range(start, start + n):
                mask[index] = True
    return mask


def test_a_loop_counts_from_its_second_copy():
    loop = [1, 2, 3, 4, 5]
    mask = repeated_mask([90, 91, 92, *loop * 4])
    assert mask.tolist() == [False] * 8 + [True] * 15
    assert repeated_share([90, 91, 92, *loop * 4]) == pytest.approx(15 / 23)


def test_a_copy_that_is_not_adjacent_counts_once():
    sentence = list(range(10))
    mask = repeated_mask([*sentence, 50, 51, 52, *sentence, 60])
    assert mask.tolist() == [False] * 13 + [True] * 10 + [False]


def test_seven_tokens_in_common_are_a_phrase_and_eight_a_repeat():
    assert not repeated_mask([*range(7), 50, *range(7), 51]).any()
    assert repeated_mask([*range(8), 50, *range(8), 51]).sum() == 8


def test_equals_the_definition_on_random_texts():
    rng = np.random.default_rng(5)
    seen = 0
    assert repeated_share([]) == 0.0
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(1, 4), size=rng.integers(0, 50)).tolist()
        n = int(rng.integers(1, 9))
        expected = slow_mask(tokens, n)
        assert repeated_mask(tokens, n).tolist() == expected
        seen += 0 < sum(expected) < len(expected)
    assert seen > 100  # texts that are neither all repeated nor free of it


@pytest.mark.parametrize(("tokens", "n", "named"), [([1, 2], 0, "got 0"), ([[1, 2]], 8, r"\(1, 2\)")])
def test_bad_input_is_named(tokens, n, named):
    with pytest.raises(ValueError, match=named):
        repeated_mask(tokens, n)
