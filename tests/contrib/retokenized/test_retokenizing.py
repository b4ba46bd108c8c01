"""Text of a drafter's tokens becomes what the target's own tokenizer makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reciters import TEXT, WORDS, byte_level, sentence_piece
from tokenizers import Tokenizer as Backend
from tokenizers import models

from specdec_jax.contrib.retokenized.byte_pairs import BYTES, MORE, is_bpe, retokenize, tables
from specdec_jax.loading import Tokenizer
from specdec_jax.loading.across import ids_by_key, keys_of

pytestmark = pytest.mark.slow

TOKENIZERS = {
    "GPT-2's words": lambda: byte_level(380),
    "Llama 3's words": lambda: byte_level(400, WORDS),
    "no words": lambda: sentence_piece(300),
}
DRAFTER = byte_level(330, text=TEXT[::-1])  # with little in common, and no special token but the end's role
MOST = 8


def tokenised_again(target, drafter, drafts, rows=None):
    """(tokens, own tokens that have ended with each) of every draft."""
    found = tables(target, drafter, rows or drafter.vocab_size)
    tokens = np.zeros((len(drafts), MOST), np.int32)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft
    length = jnp.asarray([len(draft) for draft in drafts], jnp.int32)
    again = jax.jit(retokenize, static_argnums=3)(found, jnp.asarray(tokens), length, target.vocab_size)
    kept = [int(count) for count in again[1]]
    return [(again[0][row, :n].tolist(), again[2][row, :n].tolist()) for row, n in enumerate(kept)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whatever_is_drafted_is_tokenised_as_the_target_does(name):
    """Every eight tokens of a text from a word on, of another text in other letters, and of runs of spaces."""
    target = TOKENIZERS[name]()
    words = TEXT.split(" ")
    texts = [" " + " ".join(words[at:]) for at in range(len(words))] + ["\n\n\n    x = 1\n", "   y  (z)\n", "    \n\nw"]
    drafts = [DRAFTER.encode(text)[:MOST] for text in texts]
    whole = [DRAFTER.decode(draft) for draft in drafts]
    complete = [row for row, text in enumerate(whole) if "\ufffd" not in text]
    found = tokenised_again(target, DRAFTER, [drafts[row] for row in complete])
    assert len(complete) > 50
    for row, (tokens, _) in zip(complete, found, strict=True):
        assert tokens == target.encode(whole[row])[:MOST], whole[row]


def test_it_says_where_both_vocabularies_end():
    target, drafter = DRAFTER, byte_level(380)  # whose tokens are longer
    draft = drafter.encode(" rain, they'd")[:MOST]
    ((tokens, ends),) = tokenised_again(target, drafter, [draft])
    ours, theirs = keys_of(target), keys_of(drafter)
    assert -1 in ends and max(ends) > 1
    for place, own in enumerate(ends):
        text = b"".join(ours[token] for token in tokens[: place + 1])
        prefixes = {b"".join(theirs[token] for token in draft[:n]): n for n in range(1, len(draft) + 1)}
        assert own == prefixes.get(text, -1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_ends_before_what_the_target_cannot_say(name):
    """A special token that the target lacks; half a character, unless the target has tokens for its bytes."""
    target, ids = TOKENIZERS[name](), ids_by_key(DRAFTER)
    mine, pad = (DRAFTER.backend.token_to_id(word) for word in ("<|mine|>", "<|pad|>"))
    rain, dash = DRAFTER.encode(" rain"), [ids[bytes([byte])] for byte in "—".encode()]
    drafts = [[*rain, mine, *rain], [pad], [*rain, *dash[:2]], [*rain, *dash], [*rain, DRAFTER.eos_ids[0], *rain]]
    drafts = [draft[:MOST] for draft in drafts]
    found = [tokens for tokens, _ in tokenised_again(target, DRAFTER, drafts)]
    plain = target.encode(" rain")
    if name == "no words":  # it has neither special token, and characters
        assert found[:3] == [plain, [], plain]
    else:
        assert found[0] == target.encode(DRAFTER.decode(drafts[0], skip_special=False))[:MOST]
        assert found[1] == target.encode("<|pad|>")
        assert b"".join(keys_of(target)[token] for token in found[2]) == b" rain" + "—".encode()[:2]
    assert found[3] == target.encode(" rain—")
    assert found[4][: len(plain) + 1] == [*plain, target.eos_ids[0]]


def test_a_text_beyond_the_room_is_cut():
    """Eight tokens of many spaces: what is proposed still begins the text."""
    drafter, target = sentence_piece(300), byte_level(380)
    run = drafter.backend.token_to_id("    ")
    drafter.backend.add_tokens([" " * 24])
    long = drafter.backend.token_to_id(" " * 24)
    for draft in ([run] * MOST, [long] * MOST):
        ((tokens, _),) = tokenised_again(target, drafter, [draft])
        text = target.decode(tokens)
        assert text and set(text) == {" "} and len(text) <= BYTES * MOST + MORE


def test_padding_and_tokens_without_a_row_are_never_proposed():
    target = byte_level(380)
    more = DRAFTER.vocab_size + 5  # rows that pad the drafter's embedding
    draft = [*DRAFTER.encode(" rain"), more - 1]
    ((tokens, _),) = tokenised_again(target, DRAFTER, [draft], rows=more)
    assert tokens == target.encode(" rain")


def test_other_tokenizers_are_refused():
    unigram = Tokenizer(Backend(models.Unigram([("a", 0.0)])), {})
    assert not is_bpe(unigram) and is_bpe(DRAFTER)
    with pytest.raises(ValueError, match="byte-pair encoding, and the target's tokenizer is Unigram"):
        tables(unigram, DRAFTER, DRAFTER.vocab_size)
