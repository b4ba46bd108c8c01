"""Tokens of two tokenizers: which are one, and how one spells those of the other."""

import json

import numpy as np
import pytest
import tiny_weights as tiny
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from specdec_jax.loading import Tokenizer, load_model
from specdec_jax.loading.across import share_of, translation
from specdec_jax.loading.tokenizer import tokenizer_from_folder
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return tokenizer_from_folder(tiny.write_folder(tmp_path_factory.mktemp("tiny"), tiny.weights()))


@pytest.fixture(scope="module")
def sentence_piece():
    """Spaces as U+2581, bytes as <0x..>, special tokens by other names."""
    words = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "\u2581hell", "\u2581x"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "hell")]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return Tokenizer(backend, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"})


def test_tokens_are_one_by_what_they_stand_for(byte_level, sentence_piece):
    ours, theirs = byte_level.vocabulary(), sentence_piece.vocabulary()
    own, pieces, count = translation(byte_level, sentence_piece, len(ours) + 3)
    assert own[ours["hell"]] == theirs["hell"] and own[ours["h"]] == theirs["h"]
    assert own[ours["</s>"]] == theirs["<eos>"] and own[ours["<s>"]] == theirs["<bos>"]  # by their roles
    assert own[ours["\u010a"]] == theirs["<0x0A>"]  # a line feed
    assert own[ours["\u0120"]] == theirs["\u2581"] and (own[len(ours) :] == -1).all()  # padding is nobody's
    hello = ours["hello"]
    assert own[hello] == -1 and pieces[hello, : count[hello]].tolist() == [theirs["hell"], theirs["o"]]
    assert pieces[ours["</s>"], : count[ours["</s>"]]].tolist() == [theirs["<eos>"]]  # not the letters of its text


def test_a_long_spelling_keeps_its_end_and_what_cannot_be_spelled_is_token_0():
    ours = {"abcdefghijkl": 0, "a": 1, "z": 2}
    theirs = {letter: i for i, letter in enumerate("lkjihgfedcba")}
    both = (Tokenizer(Backend(models.BPE(vocabulary, [])), {}) for vocabulary in (ours, theirs))
    _, pieces, count = translation(*both, 3)
    assert pieces[0].tolist() == [theirs[letter] for letter in "efghijkl"]
    assert (pieces[2, 0], count.tolist()) == (0, [8, 1, 1])


def test_and_the_other_way_round(byte_level, sentence_piece):
    ours, theirs = sentence_piece.vocabulary(), byte_level.vocabulary()
    own, pieces, count = translation(sentence_piece, byte_level, len(ours))
    assert own[ours["<0xC3>"]] == theirs["\u00c3"]  # half a character
    token = ours["\u2581hell"]
    spelled = [byte_level.backend.id_to_token(i) for i in pieces[token, : count[token]]]
    assert own[token] == -1 and "".join(spelled) == "\u0120hell" and len(spelled) > 1
    shared = own[own >= 0]
    assert len(set(shared.tolist())) == len(shared) >= 256  # <0x68> and h are one, and drafted once
    assert pieces[ours["<0x68>"], 0] == pieces[ours["h"], 0] == theirs["h"]


def test_the_share_of_a_text(byte_level, sentence_piece):
    assert share_of(byte_level, byte_level, "hello hell") == 1.0
    tokens = byte_level.encode("hello hell")
    lacking = [token for token in tokens if translation(byte_level, sentence_piece, 263)[0][token] < 0]
    assert share_of(byte_level, sentence_piece, "hello hell") == pytest.approx(1 - len(lacking) / len(tokens))
    assert lacking


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_with_its_ids_dealt_anew_is_always_right(tmp_path, capsys, temperature):
    """Same weights, every id another: a drafter whose drafts are all accepted, if every id is translated right."""
    config = tiny.CONFIG | {"vocab_size": len(tiny.vocabulary())}  # no padding, which no tokenizer can translate
    named = tiny.weights(config)
    target = tiny.write_folder(tmp_path / "target", named, config)
    dealt = np.random.default_rng(0).permutation(len(tiny.vocabulary()))
    rows = np.argsort(dealt)
    embedding = "model.embed_tokens.weight"
    anew = {**named, embedding: np.ascontiguousarray(named[embedding][rows])}
    other = tiny.write_folder(tmp_path / "other", anew, config)
    content = json.loads((other / "tokenizer.json").read_text())
    model = content["model"]
    model["vocab"] = {token: int(dealt[i]) for token, i in model["vocab"].items()}
    content["added_tokens"] = [{**one, "id": int(dealt[one["id"]])} for one in content["added_tokens"]]
    (other / "tokenizer.json").write_text(json.dumps(content))
    drafter = load_model(other, dtype="float32")
    options = {"policy": static(draft_length=3), "costs": "estimated"}
    pair = build_pair(load_model(target, dtype="float32"), drafter, **options)
    assert "has another vocabulary" in pair.notices[0] and capsys.readouterr().err == ""
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature, stop_ids=())
    counts = generate("hello hell", sampling, pair=pair).statistics
    assert 0 < counts["num_draft_tokens"] == counts["num_accepted_tokens"]
