"""The detector of repeated text, on texts made for it and against a slow twin that reads like the definition."""

import numpy as np
import pytest
from refusals import refusals

from specdec_jax.metrics.repetition import repeated_mask, repeated_share


def test_texts_by_hand():
    """A loop from its second copy on, a copy that is not adjacent, and seven tokens in common, which are a phrase."""
    loop, sentence = [90, 91, 92, *[1, 2, 3, 4, 5] * 4], list(range(10))
    assert repeated_mask(loop).tolist() == [False] * 8 + [True] * 15
    assert repeated_share(loop) == pytest.approx(15 / 23)
    assert repeated_mask([*sentence, 50, 51, 52, *sentence, 60]).tolist() == [False] * 13 + [True] * 10 + [False]
    assert not repeated_mask([*range(7), 50, *range(7), 51]).any()
    assert repeated_mask([*range(8), 50, *range(8), 51]).sum() == 8


def test_equals_the_definition_on_random_texts():
    rng = np.random.default_rng(5)
    seen = 0
    assert repeated_share([]) == 0.0
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(1, 4), size=rng.integers(0, 50)).tolist()
        n = int(rng.integers(1, 9))
        expected = [False] * len(tokens)  # the definition, word for word
        for start in range(len(tokens) - n + 1):
            if any(tokens[start : start + n] == tokens[earlier : earlier + n] for earlier in range(start)):
                expected[start : start + n] = [True] * n
        assert repeated_mask(tokens, n).tolist() == expected
        seen += 0 < sum(expected) < len(expected)
    assert seen > 100  # texts that are neither all repeated nor free of it


test_bad_input_is_named = refusals(
    (lambda: repeated_mask([1, 2], 0), "got 0"), (lambda: repeated_mask([[1, 2]], 8), r"\(1, 2\)")
)
