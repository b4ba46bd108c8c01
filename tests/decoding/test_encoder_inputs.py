"""Decoding with an encoder: each row has its own source, read once, and drafts change nothing of what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from tiny_llama import one_pass
from tiny_t5 import SMALL, padded, pair, random_sources, variant

from specdec_jax import ModelParams, build_decoder
from specdec_jax.contrib.encoder import t5
from specdec_jax.decoding.scoring import score
from specdec_jax.drafters import model, multi_drafter, ngram, no_drafter, prompt_lookup
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.lossless.sampled import test_by_sampling as by_sampling
from specdec_jax.models import llama
from specdec_jax.monitors import phases
from specdec_jax.stopping import adaedl, static
from specdec_jax.types import Drafter
from specdec_jax.verification import block, rejection

pytestmark = pytest.mark.usefixtures("exact_products")

MOST, NEW = 4, 24
SOURCES = random_sources((40, 3, 17, 64))
FIRST = [[0]] * len(SOURCES)


@functools.cache
def tiny():
    return pair()


@functools.cache
def with_own_kind():
    """A decoder whose drafter is a T5 too, and the parameters of both."""
    target, params, noisy = tiny()
    return decoder_of(drafter_of(target, MOST)), ModelParams(params, noisy)


@functools.cache
def decoder_of(drafter, policy=None, verifier=None, monitor=None, **more):
    target, _, _ = tiny()
    options = {"prefill_chunk": 4, "verification_widths": (MOST + 1,), "monitor": monitor} | more
    return build_decoder(target, drafter, policy or static(), verifier or rejection(), **options)


def decode(decoder, params, prompts=FIRST, sources=SOURCES, **options):
    options = {"max_new_tokens": NEW, "stop_ids": ()} | options
    state = decoder.prefill(params, prompts, sources=sources, **options)
    return jax.tree.map(np.asarray, decoder.run(params, state))


@functools.cache
def plain():
    with jax.default_matmul_precision("highest"):
        return decode(decoder_of(no_drafter(), verification_widths=(1,)), ModelParams(tiny()[1])).tokens[:, : NEW + 1]


def other_source(drafter):
    """One that reads other tokens. Made anew: a changed copy is called alike, and shares its programs."""

    def init(params, batch, slots, source):
        tokens, length = source
        return drafter.init(params, batch, slots, ((tokens + 20) % SMALL.vocab_size, length))

    return Drafter(init, drafter.source, drafter.commit, MOST, drafter.model, prefill=drafter.prefill)


def decoder_alone():
    config = llama.LlamaConfig(**(vars(tiny_llama.CONFIG) | {"vocab_size": SMALL.vocab_size}))
    return llama.language_model(config, jnp.float32), llama.init_params(config, jax.random.key(0), jnp.float32)


def drafters():
    target, _, noisy = tiny()
    own = drafter_of(target, MOST)
    yield "t5", own, noisy, None
    yield "another source", other_source(own), noisy, None
    yield "several", multi_drafter([own, prompt_lookup(MOST)]), (noisy, None), phases()
    small, weights = decoder_alone()
    yield "decoder alone", model(small, MOST), weights, None
    weights = reduce_params(target, noisy, np.arange(5, 40))
    yield "draft vocabulary", drafter_of(with_reduced_head(target, 16), MOST), weights, None
    yield "ngram", ngram(MOST, slots=64), None, None
    yield "prompt_lookup", prompt_lookup(MOST), None, None


def test_greedy_decoding_is_what_one_pass_says():
    target, params, _ = tiny()
    tokens = plain()
    logits, _ = one_pass(target, params, jnp.asarray(tokens), 32, padded(SOURCES, 64))
    np.testing.assert_array_equal(tokens[:, 1:], logits[:, :NEW].argmax(-1))
    assert len({tuple(row) for row in tokens.tolist()}) == len(SOURCES)  # the sources say something


@pytest.mark.often(4)
@pytest.mark.parametrize("case", drafters(), ids=lambda case: case[0])
def test_every_drafter_decodes_as_plain_decoding_does(case):
    name, drafter, weights, monitor = case
    state = decode(decoder_of(drafter, monitor=monitor), ModelParams(tiny()[1], weights))
    np.testing.assert_array_equal(state.tokens[:, : NEW + 1], plain())
    accepted, drafted = (int(state.statistics._asdict()[f"num_{what}_tokens"].sum()) for what in ("accepted", "draft"))
    if name in ("t5", "several", "draft vocabulary"):
        assert 0 < accepted < drafted
    elif name == "another source":
        own = decode(*with_own_kind()).statistics
        assert accepted / drafted < 0.5 * own.num_accepted_tokens.sum() / own.num_draft_tokens.sum()


def test_policies_verifiers_and_lengths():
    """Narrow and wide verifications, forced beginnings of the text, and no two rows alike."""
    target, params, noisy = tiny()
    decoder = decoder_of(drafter_of(target, MOST), adaedl(), block(), verification_widths=(2, MOST + 1))
    expected = plain()
    prompts, rest = [expected[row, : 1 + 3 * row].tolist() for row in range(4)], [NEW - 3 * row for row in range(4)]
    state = decode(decoder, ModelParams(params, noisy), prompts, max_new_tokens=rest)
    np.testing.assert_array_equal(state.tokens[:, : NEW + 1], expected)
    assert state.prompt_length.tolist() == [1, 4, 7, 10]


def test_rows_are_refilled_with_other_sources():
    """In the shapes of the other tests; a source of another bucket is refused."""
    (decoder, given), more = with_own_kind(), {"stop_ids": (), "source_slots": 64}
    state = decoder.idle(given, 4, 64, **more)
    for row in (0, 1):
        state = decoder.refill(given, state, row, [0], sources=[SOURCES[row]], max_new_tokens=NEW, **more)
    state = decoder.run(given, state, rounds=2)
    state = decoder.refill(given, state, 0, [0], sources=[SOURCES[2]], max_new_tokens=NEW, **more)
    with pytest.raises(ValueError, match="give it the state's source_slots"):
        decoder.refill(given, state, 1, [0], sources=[[3]], max_new_tokens=NEW, **more | {"source_slots": 96})
    state = jax.tree.map(np.asarray, decoder.run(given, state))
    np.testing.assert_array_equal(state.tokens[:2, : NEW + 1], plain()[[2, 1]])


@pytest.mark.parametrize(
    ("sources", "more", "named"),
    [
        (None, {}, "the target has an encoder: give a source for each prompt"),
        ([[3]], {}, "4 prompts need as many sources, got 1"),
        ([[3], [], [4], [5]], {}, "a source is empty"),
        ([[3], [61], [4], [5]], {}, "source 1 has token 61, outside the vocabulary of 61"),
        ([[3], [4], [5] * 65, [6]], {}, "source 2 of 65 tokens exceeds the target's most, 64"),
        (SOURCES, {"source_slots": 32}, "32 slots cannot hold a source of 64 tokens"),
    ],
)
def test_sources_that_are_refused(sources, more, named):
    decoder, params = with_own_kind()
    compiled = decoder.num_programs("prefill")
    with pytest.raises(ValueError, match=named):
        decoder.prefill(params, FIRST, sources=sources, **more)
    assert decoder.num_programs("prefill") == compiled


def test_what_has_no_source_to_give():
    small, weights = decoder_alone()
    plain_decoder = build_decoder(small, no_drafter(), static(), rejection())
    with pytest.raises(ValueError, match="the target has no encoder, and 1 sources are given"):
        plain_decoder.prefill(ModelParams(weights), [[1]], sources=[[3]])
    with pytest.raises(ValueError, match="the drafter has an encoder, and the target, which has none"):
        build_decoder(small, drafter_of(tiny()[0], MOST), static(), rejection())
    decoder, given = with_own_kind()
    with pytest.raises(ValueError, match="extend, .* does not serve models with an encoder"):
        decoder.extend(given, decoder.idle(given, 4, 64, source_slots=64), [[0, 3]])
    with pytest.raises(ValueError, match="score does not serve models with an encoder"):
        score(decoder, given, [[0, 3, 4]])


def test_a_generation_copies_nothing_of_the_source():
    """Heads are wide: keys and values dwarf scores, which it needs for a layer and a width at a time."""
    if jax.__version_info__ < (0, 11):
        pytest.xfail("XLA of jax 0.10 (Python 3.11) keeps one copy of the caches: docs/performance.md")
    config = variant(num_encoder_layers=1, head_dim=256, max_position_embeddings=4096)
    target = t5.language_model(config, jnp.float32)
    params = t5.init_params(config, jax.random.key(0), jnp.float32)
    decoder = build_decoder(target, model(target, 3), static(), rejection())
    given = ModelParams(params, params)
    options = {"sources": [[3]], "source_slots": 1024, "max_new_tokens": 8}
    state = jax.eval_shape(lambda: decoder.prefill(given, [[0]], **options))
    cross = sum(
        leaf.size * leaf.dtype.itemsize for leaf in (*state.target_cache.cross_keys, *state.target_cache.cross_values)
    )
    memory = decoder.jitted["run"].lower(given, state, np.int32(1), np.int32(1)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * cross  # a layer's keys are a quarter
    assert memory.alias_size_in_bytes > 0.95 * memory.output_size_in_bytes


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("read", [[3, 5, 4, 1], [6, 2, 5, 6]], ids=["its source", "control"])
def test_sampled_texts_have_the_targets_distribution(read):
    """Chi-square of the whole decoder, given a source. Control: texts of one that reads another are seen."""
    config = variant(vocab_size=7, num_encoder_layers=1, num_hidden_layers=1, eos_token_ids=())
    target, params, noisy = pair(config, noise=0.3)
    decoder = build_decoder(target, model(target, 2), static(), rejection(), verification_widths=(3,))
    own = decoder._replace(prefill=lambda *a, sources, **b: decoder.prefill(*a, sources=[read] * len(sources), **b))
    report = by_sampling(own, ModelParams(params, noisy), [0], source=[3, 5, 4, 1], tokens=3, joint=2, sequences=8192)
    assert report.lossless == (read == [3, 5, 4, 1]), report
    assert report.cells > 30 and report.drafted[-1] > 0
