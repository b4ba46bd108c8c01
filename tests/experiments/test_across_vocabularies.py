"""The experiments on drafters of another vocabulary: what they count, by hand, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from reciters import TEXT, byte_level, sentence_piece
from tiny_llama import random_named, variant
from tiny_weights import weights, write_folder

from experiments import across, retokenize
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.across import with_targets_tokens
from specdec_jax.loading.token_keys import keys_of
from specdec_jax.models import llama

pytestmark = pytest.mark.slow


def test_ways_to_tokenise_again_are_compared_on_texts_that_go_on(tmp_path):
    target, drafter = byte_level(380), sentence_piece(300)
    drafted, wanted = retokenize.samples(target, drafter, TEXT, 5, 60)
    said = retokenize.said
    for draft, tokens in zip(drafted, wanted, strict=True):
        assert said(drafter, draft).startswith(said(target, tokens)) and len(tokens) <= 5
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "' + TEXT.replace('"', "").replace("\n", " ") + '"}\n', encoding="utf-8")
    config = retokenize.Retokenize(prompts=(str(prompts),), drafts=5, samples=60)
    ways = retokenize.ways_of(target, drafter, 5)
    found = retokenize.column(config, str(prompts), target, drafter, ways)
    assert found["merges within words"] == found["the tokenizer itself"] > 0.9 > found["longest"] > 0.3
    assert retokenize.agreed([1, 2, 3], [1, 2, 4, 5]) == 2 and retokenize.agreed([1], [1, 2]) == 1


def test_what_both_have_is_cut_by_bytes_and_totals_are_over_prompts():
    both = []
    for tokenizer in (byte_level(380), sentence_piece(300)):
        config = variant(vocab_size=tokenizer.vocab_size)
        params = llama.params_from_named(config, random_named(config), jnp.float32)
        both.append(LoadedModel(llama.language_model(config, jnp.float32), params, tokenizer, "tiny", config))
    joined = with_targets_tokens(*both, "tokens")
    few, keys = across.with_few(*both, joined, 2), keys_of(both[0].tokenizer)
    kept = [
        token for token in joined.params.tokens.tolist() if isinstance(keys[token], bytes) and len(keys[token]) <= 2
    ]
    assert few.params.tokens.tolist() == kept and 0 < len(kept) < joined.params.tokens.size
    own = np.asarray(joined.params.kernel)[np.isin(joined.params.tokens, kept)]
    np.testing.assert_array_equal(few.params.kernel, own)
    row = dict.fromkeys(across.COUNTS, 2) | {"num_emitted_tokens": 6}
    rows = [{"way": way, **row, "seconds": seconds} for way, seconds in (("plain", 2.0), ("plain", 4.0), ("text", 3.0))]
    _, lines = across.table(rows, {"plain": None, "text": (0.5, 0.75)})
    assert lines == [
        ["plain", "–", "–", "1.00", "3.00", "2.0", "1.00"],
        ["text", "50%", "75%", "1.00", "3.00", "2.0", "1.00"],
    ]


def test_a_pair_of_one_vocabulary_is_refused(tmp_path, capsys):
    folder = str(write_folder(tmp_path / "tiny", weights()))
    assert across.main(["--target", folder, "--drafter", folder, "--out", str(tmp_path / "out")]) == 2
    assert "have one vocabulary" in capsys.readouterr().err and not (tmp_path / "out").exists()
