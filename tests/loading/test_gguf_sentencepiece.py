"""SentencePiece tokenizers in GGUF files: ids as its own rule gives them, text back, written and refused."""

import gguf
import numpy as np
import pytest
import tiny_weights as tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers

from specdec_jax.contrib.gguf_writer import tokenizer_metadata
from specdec_jax.loading import Tokenizer
from specdec_jax.loading.gguf.reader import read_gguf
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf

SPECIAL, WHOLE = ["<unk>", "<s>", "</s>"], ["  ", "<b>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
MERGED = ["ab", "▁a", "bab", "▁ab", "aba", "ca", "▁c", "éa", "abab", "▁▁"]  # by falling score
LETTERS = ["a", "b", "c", "é", "▁", "<", ">"]
TOKENS = [*SPECIAL, *WHOLE, *BYTES, "bc", *MERGED, *LETTERS]  # the first of them unused
KINDS = [2, 3, 3, 4, 4, *[6] * 256, 5, *[1] * (len(MERGED) + len(LETTERS))]
SCORES = [*[0.0] * (len(TOKENS) - len(MERGED) - len(LETTERS)), *(-float(i) for i in range(17))]
TEXTS = ["ab", " ab ca", "a  b   c", "<s>ab</s> ab", "é🙂 éa", "ababab<b>babab", "a\nb", "▁ a", "   ", ""]


def metadata(**changes):
    entries = {"model": "llama", "pre": "default", "tokens": TOKENS, "token_type": KINDS, "scores": SCORES}
    entries |= {"merges": None, "add_space_prefix": False} | changes
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def read(tmp_path, **changes) -> Tokenizer:
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(), metadata=metadata(**changes))
    return tokenizer_from_gguf(read_gguf(path))


def by_the_rule(text: str) -> list[int]:
    """Of text without whole tokens: the two neighbours of the best union first, then bytes."""
    score = {token: SCORES[i] for i, token in enumerate(TOKENS) if KINDS[i] == 1}
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [(-score[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in score]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [[TOKENS.index(p)] if p in score else [TOKENS.index(BYTES[b]) for b in p.encode()] for p in parts]
    return [i for some in ids for i in some]


def test_ids_are_those_of_the_rule(tmp_path):
    tokenizer, rng = read(tmp_path), np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("aabbc é🙂"), 12))
        while "  " in text:  # a token of its own
            text = text.replace("  ", " ")
        assert tokenizer.encode(text) == by_the_rule(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whole_tokens_special_ones_and_the_beginning(tmp_path):
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("<s>a  b<b>  c", add_special=True)
    assert [TOKENS[i] for i in ids] == ["<s>", "<s>", "a", "  ", "b", "<b>", "  ", "c"]
    assert tokenizer.decode(ids) == "a  b<b>  c" and tokenizer.decode(ids, skip_special=False).startswith("<s><s>a")
    assert tokenizer.encode("<unk>") == [0] and tokenizer.decode([0]) == ""
    assert tokenizer.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert read(tmp_path, add_bos_token=False).encode("a", add_special=True) == tokenizer.encode("a")


@pytest.mark.parametrize("prefix", [True, False])
def test_special_tokens_in_messages_are_characters(tmp_path, prefix):
    tokenizer = read(tmp_path, add_space_prefix=prefix)
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "ab</s>"}] * 2, parse_special=False))
    plain = by_the_rule(" " * prefix + "ab</s>")
    assert ids == [1, *plain, 2] * 2 and 2 not in plain


@pytest.mark.parametrize("said", [True, None])
def test_a_space_in_front(tmp_path, said):
    tokenizer = read(tmp_path, add_space_prefix=said)
    assert tokenizer.encode("ab c") == by_the_rule(" ab c") != by_the_rule("ab c")
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize("prefix", [True, False])
def test_what_is_written_comes_back(tmp_path, prefix):
    before = read(tmp_path, add_space_prefix=prefix)
    rows = len(TOKENS) + 3
    written = tokenizer_metadata(before, rows, (2,), 1)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    tiny.add_entries(writer, written)
    writer.add_tensor("some", np.ones(3, np.float32))
    after = tokenizer_from_gguf(read_gguf(tiny.finished(writer, tmp_path / "w.gguf")))
    assert after.special == before.special and after.vocabulary().items() >= before.vocabulary().items()
    assert after.vocab_size == rows
    for text in TEXTS:
        assert after.encode(text, add_special=True) == before.encode(text, add_special=True), text
        assert after.decode(before.encode(text)) == before.decode(before.encode(text))
    made = [written["tokenizer.ggml.token_type"].count(kind) for kind in (6, 5, 4)]
    assert made == [256, 3 + 1, 2]


def set_(name, value):
    return lambda backend: setattr(backend, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_("normalizer", normalizers.Prepend("▁")), "cannot state the tokenizer's normalizer"),
        (set_("decoder", decoders.ByteLevel()), "cannot state the tokenizer's decoder"),
        (set_("pre_tokenizer", pre_tokenizers.Whitespace()), "pre_tokenizer.*Whitespace"),
        (lambda backend: backend.add_tokens(["caca"]), None),
    ],
)
def test_what_gguf_cannot_state(tmp_path, change, message):
    backend = Backend.from_str(read(tmp_path).backend.to_str())
    change(backend)
    tokenizer = Tokenizer(backend, {"eos_token": "</s>", "bos_token": "<s>"})
    if message is None:
        assert "caca" in tokenizer_metadata(tokenizer, len(TOKENS) + 1, (2,), 1)["tokenizer.ggml.tokens"]
        return
    with pytest.raises(ValueError, match=message):
        tokenizer_metadata(tokenizer, len(TOKENS), (2,), 1)


def test_merges_by_another_rule_are_refused(tmp_path):
    state = read(tmp_path).backend.to_str()
    assert '["▁","ab"]' in state
    backend = Backend.from_str(state.replace('["▁","ab"],', "", 1))
    with pytest.raises(ValueError, match="merges: they are not those of scored pieces"):
        tokenizer_metadata(Tokenizer(backend, {}), len(TOKENS), (), None)
    backend = Backend.from_str(state.replace('"<0x0A>"', '"<0x0a>"'))
    with pytest.raises(ValueError, match="without.*<0x0A>"):
        tokenizer_metadata(Tokenizer(backend, {}), len(TOKENS), (), None)
