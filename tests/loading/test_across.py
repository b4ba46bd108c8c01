"""Which of the two ways a drafter of another vocabulary takes, how that is told, and what its tokens cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spelling_models import TEXT, byte_level, sentence_piece
from tiny_llama import random_named, variant
from tiny_weights import weights, write_folder
from tokenizers import Tokenizer as Backend
from tokenizers import models

from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import LoadedModel, Tokenizer, for_target, load_model, outline
from specdec_jax.loading.across import SAMPLE_TEXT, needs_translation, probability_shared, way_for
from specdec_jax.models import llama

WORDS = byte_level(600, text=SAMPLE_TEXT)
LETTERS = byte_level(270, text=TEXT[::-1])  # and a few syllables of another text
PIECES = sentence_piece(300)


def loaded(tokenizer, name, seed=0):
    config = variant(vocab_size=tokenizer.vocab_size, eos_token_ids=())
    params = llama.params_from_named(config, random_named(config, seed), jnp.float32)
    return LoadedModel(llama.language_model(config, jnp.float32), params, tokenizer, name, config)


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
    target, small, lines = loaded(WORDS, "target"), loaded(drafter, name), []
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
    target, same = loaded(WORDS, "target"), loaded(WORDS, "same@text", 1)
    assert for_target(target, same) is same and not capsys.readouterr().err


def test_a_target_whose_text_no_merges_tokenise_is_drafted_for_by_tokens():
    unigram = Tokenizer(Backend(models.Unigram([(token, -1.0) for token in ("a", "b", " x", "long")], unk_id=0)), {})
    target = loaded(unigram, "target")
    assert way_for(target, loaded(LETTERS, "few")) == "tokens"
    why = "'few@text' for target 'target': text is tokenised again by byte-pair encoding, .* is Unigram; @tokens drafts"
    with pytest.raises(ValueError, match=why):
        needs_translation(target, loaded(LETTERS, "few@text"))


def test_the_way_stands_behind_a_source(tmp_path):
    folder = write_folder(tmp_path / "model", weights())
    plain, asked = load_model(folder, dtype="float32"), load_model(f"{folder}@text", dtype="float32")
    assert asked.name == f"{folder}@text" == outline(f"{folder}@text").name and asked.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, asked.params, plain.params)
    with pytest.raises(ValueError, match="or tokens or text .how it drafts for a target with another vocabulary"):
        load_model(f"{folder}@texts")


def test_the_probability_that_the_tokens_hold_is_a_mean_over_positions():
    target = loaded(WORDS, "target", 3)
    joined = for_target(target, loaded(PIECES, "drafter"))
    tokens = jnp.asarray([WORDS.encode(SAMPLE_TEXT)])
    logits, _ = target.model.apply(target.params, tokens, target.model.init_cache(target.params, 1, tokens.shape[1]))
    each = np.exp(np.asarray(logits[0], np.float64))
    expected = (each[:, np.asarray(joined.params.tokens)].sum(axis=1) / each.sum(axis=1)).mean()
    assert 0.1 < expected < 0.9
    assert probability_shared(target, joined.params) == pytest.approx(expected, rel=1e-4)
    assert probability_shared(target, target.params) is None
