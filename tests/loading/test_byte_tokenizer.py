"""ByT5's tokenizer is transformers' own, though no file of it is there, and streams cut it at whole characters."""

import json
import warnings

import pytest

from specdec_jax.loading import StreamDecoder
from specdec_jax.loading.tokenizer import needs_file, tokenizer_from_folder

TEXTS = (
    "Summarise: the cat sat.",
    " two  spaces\tand\na line ",
    "naïve café, 日本語, 😀👍🏽, \u0301",
    "".join(map(chr, range(1, 256))),
    "a <extra_id_0> b</s>c <extra_id_124>",
)


@pytest.fixture(scope="module")
def theirs():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@pytest.fixture(scope="module", params=["config.json", "tokenizer_config.json", "saved by transformers", "saved here"])
def ours(request, theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    if request.param == "saved by transformers":
        theirs.save_pretrained(folder)
    else:
        name = request.param if request.param.endswith(".json") else "config.json"
        (folder / name).write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    found = tokenizer_from_folder(folder)
    if request.param == "saved here":
        found.save(folder)
        assert (folder / "tokenizer.json").is_file()
        found = tokenizer_from_folder(folder)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_transformers(ours, theirs, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(text)["input_ids"]
    assert ours.encode(text, add_special=True) == expected
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_every_id_has_its_place_and_a_stream_never_ends_inside_a_character(ours, theirs):
    assert ours.vocab_size == 384 == len(theirs) and ours.eos_ids == (1,)
    assert sorted(ours.vocabulary().values()) == list(range(384))
    for role in ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_124>"):
        assert ours.vocabulary()[role] == theirs.convert_tokens_to_ids(role)
    ids = ours.encode("né日😀.", add_special=False)
    stream = StreamDecoder(ours)
    parts = [stream.push([one]) for one in ids]
    assert parts == ["n", "", "é", "", "", "日", "", "", "", "😀", "."]
    assert stream.push(ids[3:5]) == "" and stream.flush() == "\ufffd"


def test_other_tokenizers_need_their_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    (tmp_path / "spiece.model").write_bytes(b"x")
    assert needs_file(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json \(spiece.model is not enough"):
        tokenizer_from_folder(tmp_path)
