"""Pairs of two vocabularies: which tokens are one, how one spells the other's, and which way drafts take."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_weights as tiny
from scripted import tokenizer
from spelling_models import TEXT, byte_level, sentence_piece
from tiny_llama import random_llama
from tokenizers import Tokenizer as Backend
from tokenizers import models

from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import Tokenizer, for_target, load_model, outline
from specdec_jax.loading.across import SAMPLE_TEXT, needs_translation, probability_shared, translation, way_for
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams

WORDS = byte_level(600, text=SAMPLE_TEXT)
LETTERS = byte_level(270, text=TEXT[::-1])  # and a few syllables of another text
PIECES = sentence_piece(300)
OF_BYTES, OF_PIECES = tokenizer(), sentence_piece(400, text="hell hell o x")


@pytest.mark.parametrize(
    ("name", "drafter", "way"),
    [
        ("few in common", LETTERS, "text"),
        ("many in common", byte_level(600, text=SAMPLE_TEXT + TEXT), "tokens"),
        ("few@tokens", LETTERS, "tokens"),
        ("many@text", byte_level(600, text=SAMPLE_TEXT + TEXT), "text"),
    ],
)
def test_the_way_is_chosen_by_what_both_have_unless_it_is_asked_for(capsys, name, drafter, way):
    target, small, lines = random_llama(WORDS, "target"), random_llama(drafter, name), []
    joined = for_target(target, small, lines.append)
    assert drafter_of(joined.model, 7).name == ("retokenized" if way == "text" else "model")
    (said,) = lines
    assert for_target(target, small) is not small and capsys.readouterr() == ("", "")
    begins = f"{name} has another vocabulary than target: "
    how = "it drafts the" if way == "tokens" else "what it drafts is tokenised again, not only the"
    assert said.startswith(begins + how)
    count = joined.params.tokens.size
    share = np.isin(WORDS.encode(SAMPLE_TEXT), joined.params.tokens).mean()
    assert f" {count:,} tokens that both have, {share:.0%} of those of a sample text" in said


def test_nothing_is_chosen_for_one_vocabulary(capsys):
    target, same = random_llama(WORDS, "target"), random_llama(WORDS, "same@text", 1)
    assert for_target(target, same) is same and not capsys.readouterr().err


def test_a_target_whose_text_no_merges_tokenise_is_drafted_for_by_tokens():
    unigram = Tokenizer(Backend(models.Unigram([(token, -1.0) for token in ("a", "b", " x", "long")], unk_id=0)), {})
    target = random_llama(unigram, "target")
    assert way_for(target, random_llama(LETTERS, "few")) == "tokens"
    why = "'few@text' for target 'target': text is tokenised again by byte-pair encoding, .* is Unigram; @tokens drafts"
    with pytest.raises(ValueError, match=why):
        needs_translation(target, random_llama(LETTERS, "few@text"))


def test_the_way_stands_behind_a_source(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", tiny.weights())
    plain, asked = load_model(folder, dtype="float32"), load_model(f"{folder}@text", dtype="float32")
    assert asked.name == f"{folder}@text" == outline(f"{folder}@text").name and asked.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, asked.params, plain.params)
    with pytest.raises(ValueError, match="or tokens or text .how it drafts for a target with another vocabulary"):
        load_model(f"{folder}@texts")


def test_the_probability_that_the_tokens_hold_is_a_mean_over_positions():
    target = random_llama(WORDS, "target", 3)
    joined = for_target(target, random_llama(PIECES, "drafter"))
    tokens = jnp.asarray([WORDS.encode(SAMPLE_TEXT)])
    logits, _ = target.model.apply(target.params, tokens, target.model.init_cache(target.params, 1, tokens.shape[1]))
    each = np.exp(np.asarray(logits[0], np.float64))
    expected = (each[:, np.asarray(joined.params.tokens)].sum(axis=1) / each.sum(axis=1)).mean()
    assert 0.1 < expected < 0.9
    assert probability_shared(target, joined.params) == pytest.approx(expected, rel=1e-4)
    assert probability_shared(target, target.params) is None


def test_tokens_are_one_by_what_they_stand_for():
    ours, theirs = OF_BYTES.vocabulary(), OF_PIECES.vocabulary()
    own, pieces, count = translation(OF_BYTES, OF_PIECES, len(ours) + 3)
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


def test_and_the_other_way_round():
    ours, theirs = OF_PIECES.vocabulary(), OF_BYTES.vocabulary()
    own, pieces, count = translation(OF_PIECES, OF_BYTES, len(ours))
    assert own[ours["<0xC3>"]] == theirs["\u00c3"]  # half a character
    token = ours["\u2581hell"]
    spelled = [OF_BYTES.backend.id_to_token(i) for i in pieces[token, : count[token]]]
    assert own[token] == -1 and "".join(spelled) == "\u0120hell" and len(spelled) > 1
    shared = own[own >= 0]
    assert len(set(shared.tolist())) == len(shared) >= 256  # <0x68> and h are one, and drafted once
    assert pieces[ours["<0x68>"], 0] == pieces[ours["h"], 0] == theirs["h"]


def test_the_target_itself_with_its_ids_dealt_anew_is_always_right(tmp_path, capsys):
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
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=24, temperature=temperature, stop_ids=())
        counts = generate("hello hell", sampling, pair=pair).statistics
        assert 0 < counts["num_draft_tokens"] == counts["num_accepted_tokens"]
