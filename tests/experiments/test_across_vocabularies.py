"""The experiment on drafters of another vocabulary: what it counts, by hand."""

import pytest
from reciters import TEXT, byte_level, sentence_piece

from experiments.lib import retokenize

pytestmark = pytest.mark.slow


def test_ways_to_tokenise_again_are_compared_on_texts_that_go_on():
    target, drafter = byte_level(380), sentence_piece(300)
    drafted, wanted = retokenize.samples(target, drafter, TEXT, 5, 60)
    bytes_of = retokenize.bytes_of
    for draft, tokens in zip(drafted, wanted, strict=True):
        assert bytes_of(drafter, draft).startswith(bytes_of(target, tokens)) and len(tokens) <= 5
    text = TEXT.replace('"', "").replace("\n", " ")
    drafted, wanted = retokenize.samples(target, drafter, text, 5, 60)
    found = {
        way: sum(map(retokenize.agreed, again(drafted), wanted)) / sum(map(len, wanted))
        for way, again in retokenize.ways_of(target, drafter, 5).items()
    }
    assert found["merges within words"] == found["the tokenizer itself"] > 0.9 > found["longest"] > 0.3
    assert retokenize.agreed([1, 2, 3], [1, 2, 4, 5]) == 2 and retokenize.agreed([1], [1, 2]) == 1
