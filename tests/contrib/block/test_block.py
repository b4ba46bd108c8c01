"""Drafters of blocks: their distributions are those that training computed, reported exactly, and paid by one pass.

The passes of every round are compared with `distillation.unrolled`, which computes whole texts and keeps no cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import with_source
from refusals import refusals
from stopping_cases import context
from tiny_block import BLOCK, SIZE, block_pair, block_toy, logits_of_drafts
from tiny_reading import READING, assert_first_drafts_scored, check_passes, extended, reading_pair

from configs import distill_smollm2_block
from experiments.lib.distill_train import initial_state
from specdec_jax import ModelParams, build_decoder, load_model, lossless, make_warp, verification
from specdec_jax.contrib.block import block, llama_block
from specdec_jax.decoding.sampling import distribution
from specdec_jax.distillation.batches import Batch
from specdec_jax.distillation.losses import forward_kl
from specdec_jax.distillation.training import Schedule, build_step, init_state
from specdec_jax.distillation.unrolled import Unroll
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import drafter_of, reading
from specdec_jax.loading import families
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.stopping.goodput import goodput
from specdec_jax.stopping.survival import net_by_row, rate_of, survival
from specdec_jax.types import Next

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPTS = [[3, 7, 9, 4, 4, 5, 8, 1, 20, 33, 7, 9], [5], [1, 2]]


@pytest.fixture
def pair():
    return block_pair()


@functools.lru_cache(maxsize=4)
def pair_and_decoder(policy, catch_up=4, few=None):
    """(pair, decoder), compiled once for all tests; `few`: with a draft vocabulary of these tokens."""
    target, params, drafter, own = block_pair()
    if few is not None:
        drafter, own = with_reduced_head(drafter), reduce_params(drafter, own, np.array(few))
    made = block(drafter, SIZE, catch_up)
    return (target, params, drafter, own), build_decoder(target, made, policy, verification.rejection())


def run(decoder, params, policy, temperature=1.0):
    options = {"record_rounds": 24, "max_new_tokens": 24, "stop_ids": [], "seed": 3, "slots": 96, "policy": policy}
    return decoder.run(params, decoder.prefill(params, PROMPTS, warp=make_warp(len(PROMPTS), temperature), **options))


def played(policy=static(draft_length=SIZE), temperature=1.0, catch_up=4, few=None):  # noqa: B008
    pair, decoder = pair_and_decoder(policy.bare, catch_up, few)
    return pair, run(decoder, ModelParams(pair[1], pair[3]), policy, temperature)


def check_rounds(pair, state, **options):
    """Every recorded prediction against `unrolled`, and its pass; gives how many drafts were accepted."""
    record, rounds = jax.device_get((state.record, state.statistics.num_rounds))
    predicted, played = np.isfinite(record.entropy).sum(axis=-1), np.arange(record.drafted.shape[1]) < rounds[:, None]
    assert np.all((record.drafted <= predicted) & (predicted <= record.drafted + 1), where=played)
    assert np.all(record.drafter_passes == (predicted > 0), where=played)
    assert np.all(record.discarded == ((predicted > 0) & (record.drafted == 0)), where=played)
    return check_passes(pair, state, predicted=predicted, logits_of=logits_of_drafts, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_has_the_logits_that_training_computes(temperature):
    """And features shifted by one position would be seen."""
    pair, state = played(temperature=temperature)
    accepted, drafted = check_rounds(pair, state), int(np.sum(state.statistics.num_draft_tokens))
    assert accepted > 4 and drafted - accepted > 5
    for shift in (-1, 1) if temperature else ():
        with pytest.raises(AssertionError):
            check_rounds(pair, state, shift=shift)


def test_a_rule_that_stops_inside_a_block_pays_one_pass():
    pair, state = played(adaedl(threshold=0.12))
    check_rounds(pair, state)
    record = jax.device_get(state.record)
    lengths = record.drafted[record.emitted > 0]
    assert np.sum(lengths == 0) > 0 and np.sum((lengths > 0) & (lengths < SIZE)) > 0
    assert np.all(state.statistics.drafter_passes <= state.statistics.num_rounds)


@pytest.mark.seldom
@pytest.mark.parametrize("catch_up", [2, 5])
def test_what_is_fed_again_does_not_depend_on_the_size_of_a_pass(catch_up):
    check_rounds(*played(catch_up=catch_up))


def test_extend_goes_on_as_a_fresh_prefill():
    pair, decoder = pair_and_decoder(static())
    state, fresh = extended(pair, decoder, policy=static(draft_length=SIZE))
    assert check_rounds(pair, state) > 2
    np.testing.assert_array_equal(state.tokens, fresh.tokens)


def test_with_a_draft_vocabulary_it_is_the_same_drafter_of_fewer_tokens():
    few = tuple(range(3, 50, 2))
    (_, _, drafter, _), state = played(few=few)
    assert drafter_of(drafter, 9).max_draft_length == SIZE and drafter_of(drafter, 9).num_passes(9) == 1
    check_rounds(block_pair(), state, tokens=few)


def test_greedy_output_is_plain_decodings():
    texts = [played(static(draft_length=length), temperature=0.0)[1].tokens[:, :36] for length in (SIZE, 0)]
    np.testing.assert_array_equal(*texts)


# --- the distribution -------------------------------------------------------------------------------------------------


def toy_decoder(policy, size=3):
    target, table, model, own = block_toy(size=size)
    made = build_decoder(target, block(model, size, catch_up=4), policy, verification.rejection(), prefill_chunk=4)
    return made, ModelParams(table, own)


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("rule", [at_least(2, adaedl()), survival()], ids=["adaedl", "survival"])
def test_the_whole_decoder_draws_from_the_target(rule):
    decoder, params = toy_decoder(rule, 4)
    report = lossless.test_by_sampling(decoder, params, tokens=5, sequences=16_384)
    assert report.lossless and report.drafted[1] > 500


@pytest.mark.seldom
def test_q_without_the_low_rank_term_is_rejected():
    """A drafter that draws as an honest one, and tells the distribution without that term: a bug."""

    def changed(honest, *arguments):
        def predict(memory, drafted, uniform):
            following, after = honest.predict(memory, drafted, uniform)
            base = jnp.take_along_axis(memory.base, drafted[:, None, None], axis=1)[:, 0]
            return Next(distribution(base, arguments[3].warp), following.token), after

        return honest._replace(predict=predict)

    decoder, params = toy_decoder(static(draft_length=3))
    cheat = with_source(decoder, changed)
    assert not lossless.test_by_sampling(cheat, params, tokens=4, sequences=8192).lossless


# --- costs, weights and errors ----------------------------------------------------------------------------------------


def test_rules_know_that_only_the_first_draft_costs_a_pass():
    """Where a pass is dear drafts are whole blocks or none, and each further one is nearly free."""
    plain = context(1, budget=SIZE)
    paired = plain._replace(relative_drafter_cost=jnp.array([[1.0, 0.01]]))
    for cost, length, paired_length in ((0.01, 4, 4), (0.5, 1, 4), (50.0, 0, 0)):
        state = goodput(4).init(1, drafter_cost=cost, least=0)
        found = [int(goodput(4).begin(state, each)[1].draft_length[0]) for each in (plain, paired)]
        assert found == [length, paired_length], cost
    policy = survival(8)
    state = policy.init(1, drafter_cost=0.5)
    cheap = plain._replace(relative_drafter_cost=jnp.array([0.01]))
    none, once = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32)
    for drafted, opening in ((none, 0.5 * 0.99), (once, 0.0)):
        lost = net_by_row(state, drafted, cheap) - net_by_row(state, drafted, paired)
        np.testing.assert_allclose(lost[:, : SIZE - 1], opening * rate_of(state)[0], atol=1e-6)
    seen = distribution(jnp.zeros((1, 5)), plain.warp)
    passes = [float(policy.proceed(state, seen, none, drafted, paired)[1].passes[0]) for drafted in (once, once + 1)]
    np.testing.assert_allclose(passes, [1.0, 0.01], atol=1e-6)


def test_its_weights_are_those_of_a_reading_drafter_and_more():
    """Before training the first draft is the reading drafter's."""
    target, params, drafter, own = reading_pair()
    weights = llama_block.with_block(BLOCK, own, jnp.float32)
    assert families.family("llama_block") is llama_block and "own" not in weights
    named = llama_block.named_from_params(BLOCK, weights)
    again = llama_block.params_from_named(BLOCK, named, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, weights, again)
    assert llama_block.LlamaBlockConfig.from_hf(BLOCK.to_hf()) == BLOCK
    reads = build_decoder(target, reading(drafter, SIZE), static(), verification.rejection())
    decoders = (reads, own), (pair_and_decoder(static())[1], weights)
    first = [run(decoder, ModelParams(params, given), static(draft_length=1)) for decoder, given in decoders]
    np.testing.assert_array_equal(first[0].tokens, first[1].tokens)
    np.testing.assert_allclose(first[0].record.entropy[..., 0], first[1].record.entropy[..., 0], atol=1e-5)


def test_training_teaches_what_only_the_draft_before_tells():
    """Every next token is a function of the one before it, in texts that are otherwise random: no mask can know it."""
    rng, rows, size, vocab = np.random.default_rng(0), 4, 16, BLOCK.vocab_size
    after = rng.permutation(vocab)
    tokens = rng.integers(0, vocab, (rows, size + 1)).astype(np.int32)
    place, none = np.tile(np.arange(size, dtype=np.int32), (rows, 1)), np.zeros((rows, size), np.int32)
    following, weight = after[tokens[:, :-1]].reshape(-1), np.ones(rows * size, np.float32)
    hidden = np.zeros((rows, size, 3, BLOCK.target_width), np.float32)
    every, zeros = np.arange(vocab, dtype=np.int32), np.zeros(vocab, np.float32)
    top, log_prob = following[:, None].astype(np.int32), np.log(np.full((rows * size, 1), 0.98, np.float32))
    labels = following.astype(np.int32), top, log_prob
    batch = Batch(tokens[:, :-1], place, none, weight, *labels, every, zeros, hidden)
    schedule = Schedule(steps=60, rate=0.03, warmup=5)
    step = build_step(BLOCK, schedule, forward_kl, dtype=jnp.float32, chunk=16, unroll=Unroll(SIZE, 1.0))
    params = llama_block.init_params(BLOCK, jax.random.key(0), jnp.float32)
    state, agreement = init_state(params, schedule), []
    for _ in range(schedule.steps):
        state, metrics = step(state, batch)
        agreement.append(float(metrics.last_agreement))
    assert agreement[0] < 0.2 and agreement[-1] > 0.95
    assert np.abs(state.params["mask"]).max() > 0 and np.abs(state.params["markov"]["next"]).max() > 0.1


def test_a_config_makes_a_block_of_a_reading_drafter():
    target, start = load_model("smollm2"), distill_smollm2_block.config
    state, drafter = initial_state(start, target, np.zeros(target.model.spec.vocab_size))
    assert isinstance(drafter, llama_block.LlamaBlockConfig) and state.params["mask"].shape == (3, 448)
    longer = dataclasses.replace(start, unroll=Unroll(steps=5))
    with pytest.raises(ValueError, match="unroll.steps is 5, and a block has 4 tokens"):
        initial_state(longer, target, np.zeros(target.model.spec.vocab_size))
    with pytest.raises(ValueError, match="two tokens or more"):
        dataclasses.replace(start.shape, block=1)


def test_scores_are_of_the_first_draft():
    assert_first_drafts_scored(*pair_and_decoder(static()), PROMPTS[0], logits_of_drafts)


def decoded_too_long(pair):
    longer = build_decoder(pair[0], block(pair[2], SIZE + 1), static(), verification.rejection())
    both = ModelParams(pair[1], pair[3])
    return longer.run(both, longer.prefill(both, PROMPTS, max_new_tokens=4))


OF_ONE = READING.to_hf() | {"model_type": "llama_block", "block_size": 1}
test_what_is_wrong_is_refused = refusals(
    (lambda pair: block(pair[2], 5, step_cost=0.25), "step_cost"),
    (lambda pair: block(pair[2].replace(reading=None)), "reads no target"),
    (lambda: llama_block.LlamaBlockConfig.from_hf(OF_ONE), "block_size"),
    (lambda: dataclasses.replace(BLOCK, rank=0), "rank"),
    (lambda pair: pair[2].reading.stand_in(pair[3], jnp.zeros((1, 1, 24))), "cannot be traced"),
    (lambda pair: pair[2].apply(pair[3], jnp.zeros((1, 2), jnp.int32), None), "decodes nothing alone"),
    (decoded_too_long, "4 tokens at most, got 5"),
)
