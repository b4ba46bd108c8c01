"""A drafter that proposes the most frequent tokens only: exactly the distribution it says, in every use of a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_llama import CONFIG, model_and_params, one_pass, random_tokens, variant

from specdec_jax import ModelParams, SamplingParams, build_decoder, build_pair, generate, load_model, lossless
from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.drafters import model
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.drafters.draft_models.reduced_head import LOCAL, reduce_params, with_reduced_head
from specdec_jax.loading import save_hf_folder, save_orbax, with_draft_vocabulary
from specdec_jax.loading.builtin import DRAFTERS, drafter_file
from specdec_jax.loading.draft_vocabulary import RANKING, read_tokens, split_source
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import adaedl, survival
from specdec_jax.text.calibration import calibration_of
from specdec_jax.types import Hidden
from specdec_jax.verification import rejection

SOME = np.array([40, 3, 17, 58, 0, 22])


def tiny(**changes):
    source, params = model_and_params(variant(**changes))
    return source, params, with_reduced_head(source), reduce_params(source, params, SOME)


def proposable(text, most=LOCAL):
    """The tokens that may be proposed after each token of a text, by the definition: SOME, and its first rare ones."""
    local, found = [], []
    for token in text:
        if token not in SOME and token not in local and len(local) < most:
            local.append(token)
        found.append(sorted({*SOME.tolist(), *local}))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_models_where_it_has_rows_and_impossible_elsewhere(tied):
    source, params, reduced, few = tiny(tie_word_embeddings=tied)
    tokens = random_tokens(2, 5)
    whole = np.asarray(one_pass(source, params, tokens)[0])
    logits, cache = jax.device_get(one_pass(reduced, few, tokens))
    for row, text in enumerate(np.asarray(tokens).tolist()):
        for position, may in enumerate(proposable(text)):
            here = logits[row, position]
            np.testing.assert_allclose(here[may], whole[row, position, may], rtol=1e-5, atol=1e-5)
            assert np.all(np.isneginf(np.delete(here, may)))
    head: Any = reduced.head
    noted = head.note(few, tokens, reduced.init_cache(few, 2, 32))
    small, after = jax.jit(head.apply)(few, tokens, noted)
    np.testing.assert_array_equal(small[..., : len(SOME)], logits[..., np.sort(SOME)])
    np.testing.assert_array_equal(head.spread(few, after, small), logits)
    best = jnp.argmax(small[:, -1], axis=-1)
    np.testing.assert_array_equal(head.token(few, after, best), np.argmax(logits[:, -1], axis=-1))
    np.testing.assert_array_equal(cache.length, [5, 5])


TEXT = [9, 3, 9, 50, 7, 50, 40, 8, 30, 9, 31]  # 9, 50, 7, 8, 30 and 31 are rare, in this order


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5, 8), tuple(range(1, 11))])
def test_local_tokens_are_the_texts_first_rare_ones_however_it_is_fed(cuts):
    """So many tokens a pass, with garbage after the text, and after a cut back from another text."""
    source, params = model_and_params()
    reduced, few = with_reduced_head(source, 4), reduce_params(source, params, SOME)

    @jax.jit
    def fed(cache, start, text):
        return reduced.apply(few, text, reduced.with_length(cache, start))

    def garbage(text):
        return jnp.array([[*text, *range(60, 60 - 13 + len(text), -1)]])  # one size, one program

    _, cache = fed(reduced.init_cache(few, 1, 32), jnp.array([0]), garbage([9, 3]))
    start = 0 if 1 in cuts else 2  # what is kept of the other text
    for end in (*(cut for cut in cuts if cut > start), len(TEXT)):
        logits, cache = fed(cache, jnp.array([start]), garbage(TEXT[start:end]))
        for position in range(start, end):
            finite = np.flatnonzero(np.isfinite(logits[0, position - start]))
            assert finite.tolist() == proposable(TEXT, most=4)[position]
        start = end


def test_a_local_token_beyond_the_drafters_vocabulary_is_none():
    _, _, reduced, few = tiny()
    _, cache = reduced.apply(few, jnp.array([[9, CONFIG.vocab_size, 8]]), reduced.init_cache(few, 1, 8))
    assert cache.local[0, :3].tolist() == [9, 8, 0] and np.sum(np.asarray(cache.at) < 8) == 2


@pytest.mark.parametrize("other", [CONFIG.vocab_size + 3, CONFIG.vocab_size - 2])
def test_a_padded_or_cut_vocabulary_spreads_alike(other):
    _, _, reduced, few = tiny()
    resized = with_vocabulary(reduced, other)
    tokens = random_tokens(1, 4)
    logits, _ = one_pass(resized, few, tokens)
    heads: Any = reduced.head, resized.head
    noted = heads[0].note(few, tokens, reduced.init_cache(few, 1, 32))
    small, cache = jax.jit(heads[0].apply)(few, tokens, noted)
    assert logits.shape[-1] == other
    np.testing.assert_array_equal(heads[1].spread(few, cache, small), logits)


def headed_table(vocab):
    """The toy's table as a model with a head: hidden states are one-hot in the last two tokens."""
    table = table_model(vocab)

    def hidden(params, tokens, cache, positions=None, mask=None):
        contexts = jnp.arange(vocab * vocab, dtype=jnp.float32).reshape(vocab, vocab, 1)
        which, cache = table.apply(jnp.broadcast_to(contexts, (vocab, vocab, vocab)), tokens, cache)
        return jax.nn.one_hot(which[..., 0].astype(jnp.int32), vocab * vocab), cache

    return table.replace(hidden=Hidden(hidden, lambda params: jnp.asarray(params).reshape(vocab * vocab, vocab).T))


@pytest.mark.optimised
def test_the_text_is_the_targets_in_distribution():
    """Of two tokens without a row, the drafter proposes the first that the text brings, and the other one never."""
    tables, small = toy_pair(4, 0), headed_table(4)
    drafter = model(with_reduced_head(small, most_local=1), 2, catch_up=4)
    decoder = build_decoder(table_model(4), drafter, adaedl(), rejection(), prefill_chunk=4)
    params = ModelParams(tables.target, reduce_params(small, tables.drafter, [2, 0]))
    options = {"sequences": 16_384, "policy_hyperparameters": {"threshold": 0.1}, "prompt": (0, 2)}
    report = lossless.test_by_sampling(decoder, params, **options)
    assert report.lossless, report


def test_the_source_of_a_reduced_drafter(tmp_path, monkeypatch):
    assert split_source("smollm2-drafter@8192") == ("smollm2-drafter", "8192")
    assert split_source("org/name@mine.npy") == ("org/name", "mine.npy")
    assert split_source("org/name@main") == ("org/name@main", "")
    assert split_source("@8192") == ("@8192", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder@12").mkdir()
    assert split_source("folder@12") == ("folder@12", ""), "what exists under that name is meant"


@pytest.mark.seldom
def test_the_built_in_drafter_with_a_draft_vocabulary(smollm2):
    """Same weights, same calibration, and greedily the target's text; ids from the file or by rank."""
    reduced = load_model("smollm2-drafter@2048")
    assert reduced.name == "smollm2-drafter@2048" and reduced.params.kernel.shape[0] == 2048
    ranked = np.load(drafter_file("smollm2-drafter").parent / RANKING)
    np.testing.assert_array_equal(reduced.params.tokens, np.sort(ranked[:2048]))
    pair = build_pair(smollm2, reduced, policy=survival())
    assert calibration_of("built-in", pair).drafter["name"] == "smollm2-drafter"
    request = SamplingParams(max_new_tokens=24)
    few = generate("List three fruits.", request, pair=pair)
    assert few.text == generate("List three fruits.", request, target=smollm2, drafter=None).text
    assert few.statistics["num_accepted_tokens"] > 4


@pytest.mark.seldom
def test_the_built_in_drafter_that_reads_drafts_for_the_built_in_target(smollm2):
    """Greedily the target's text, of which it guesses a good part."""
    request = SamplingParams(max_new_tokens=24)
    plain = generate("List three fruits.", request, target=smollm2, drafter=None)
    found = generate("List three fruits.", request, target=smollm2, drafter="smollm2-drafter-reading@2048")
    assert found.text == plain.text and found.statistics["num_accepted_tokens"] > 4


def test_the_built_in_drafters_rank_the_tokens_of_their_target():
    for name in DRAFTERS:
        ranked = read_tokens("16384", drafter_file(name))
        assert len(set(ranked.tolist())) == 16384 and ranked.max() < 49152


def chosen_of_61(*tokens):
    source, params = model_and_params()
    return reduce_params(source, params, [*tokens])


def ranked(folder, content=None):
    """The first token of a ranking that is an array, or a text."""
    if isinstance(content, str):
        (folder / RANKING).write_text(content)
    elif content is not None:
        np.save(folder / RANKING, content)
    return read_tokens("1", folder / "weights.gguf" if isinstance(content, str) else folder)


def saved(save, folder, drafter):
    few = with_draft_vocabulary(drafter, [1, 2])
    return save(folder / "saved", few.config, few.params, few.tokenizer)


def for_a_shorter_target(target, drafter):
    """Rows that only pad the drafter's embedding: spread over the target's, probabilities would not sum to 1."""
    shorter = target._replace(model=with_vocabulary(target.model, 49151))
    return build_pair(shorter, with_draft_vocabulary(drafter, [1, 49151]))


NOT_SAVED = "no part of saved weights: save `params.model`"
test_draft_vocabularies_that_are_none_are_refused = refusals(
    (lambda: load_model("smollm2-drafter@0"), "@0 is outside 1 to 16384"),
    (lambda: load_model("smollm2-drafter@20000"), "@20000 is outside 1 to 16384"),
    (lambda: load_model("smollm2-drafter@nowhere.npy"), "no draft vocabulary at nowhere.npy"),
    (lambda: load_model("smollm2-draft@8192"), "did you mean 'smollm2-drafter'"),
    (lambda: chosen_of_61(), "a list of token ids"),
    (lambda: chosen_of_61([1, 2]), "a list of token ids"),
    (lambda: chosen_of_61(0.5), "a list of token ids"),
    (lambda: chosen_of_61(1, 61), "holds tokens 0 to 60, got 61"),
    (lambda: chosen_of_61(-1), "holds tokens 0 to 60, got -1"),
    (lambda: chosen_of_61(4, 5, 4), "names each token once, 1 are there again"),
    (lambda: with_reduced_head(tiny()[2]), "reduced already"),
    (lambda: with_reduced_head(table_model(3)), "does not offer its head"),
    *(
        (lambda name=name: split_source(f"smollm2-drafter@{name}"), "after @ comes a number of tokens or a .npy file")
        for name in ("8k", "\u00b2", "")
    ),
    (lambda tmp_path: ranked(tmp_path), "@1 needs a ranking of tokens at .*rank_tokens"),
    (lambda tmp_path: ranked(tmp_path, np.zeros((2, 2), np.int32)), "must hold a list of token ids"),
    (lambda tmp_path: ranked(tmp_path, np.zeros(3)), "must hold a list of token ids"),
    (lambda tmp_path: ranked(tmp_path, "no array"), "is no numpy array"),
    (lambda tmp_path: ranked(tmp_path, "PK\x03\x04"), "is no numpy array"),
    (lambda tmp_path, smollm2_drafter: saved(save_hf_folder, tmp_path, smollm2_drafter), NOT_SAVED),
    (lambda tmp_path, smollm2_drafter: saved(save_gguf, tmp_path, smollm2_drafter), NOT_SAVED),
    (lambda tmp_path, smollm2_drafter: saved(save_orbax, tmp_path, smollm2_drafter), NOT_SAVED),
    (lambda smollm2, smollm2_drafter: for_a_shorter_target(smollm2, smollm2_drafter), "49151"),
    (lambda smollm2: build_pair(with_draft_vocabulary(smollm2, [1, 2]), None), "target 'smollm2' has a draft vocab"),
    error=(ValueError, FileNotFoundError),
)


def test_float32_weights_are_read_in_the_models_own_dtype():
    source, params = model_and_params(dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    few = reduce_params(source, params, SOME)
    assert few.kernel.dtype == jnp.bfloat16
    tokens = random_tokens(1, 4)
    whole, _ = one_pass(source, params, tokens)
    logits, _ = one_pass(with_reduced_head(source), few, tokens)
    np.testing.assert_allclose(logits[..., SOME], whole[..., SOME], rtol=1e-5, atol=1e-5)
