"""Combs: in the whole decoder and by enumeration, what is verified of siblings and what is emitted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerated import TOYS, distance
from refusals import refusals
from replayed import answered, decoded
from tiny_reading import reading_pair

from specdec_jax import ModelParams, build_decoder
from specdec_jax.contrib.trees import TreeDraft, comb, enumeration, hooks, rounds, siblings, survival_tree, traversal
from specdec_jax.drafters import model, multi_drafter, prompt_lookup
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.reading import reading
from specdec_jax.lossless import toys
from specdec_jax.lossless.sampled import test_by_sampling as tested_by_sampling
from specdec_jax.lossless.sampled import toy_decoder
from specdec_jax.models import bloom, llama
from specdec_jax.stopping import static, update_every
from specdec_jax.types import Draft, VerificationResult
from specdec_jax.verification import block, greedy, rejection

LIMIT = 40


def texts(target, drafter, params, policy, verifier, prompts, hyperparameters, widths=(5, 12), **warp):
    given = {"record_rounds": LIMIT, "policy_hyperparameters": hyperparameters}
    options = {"decoder_options": {"verification_widths": widths}, "prefill_options": given, "verifier": verifier}
    state = decoded(target, drafter, params, prompts, policy, limit=LIMIT, seed=0, **options, **warp)
    return [answer for _, answer in answered(state, prompts)], state


def total(state, name):
    return int(np.asarray(getattr(state.statistics, name)).sum())


def num_siblings(state, name="accepted"):
    """Siblings and children of all rounds: those that were `accepted`, or all that were `draft`ed."""
    by_position = {"accepted": "accepted_at", "draft": "drafted_at"}[name]
    return total(state, f"num_{name}_tokens") - total(state, by_position)


VOCAB, MOST = 8, 4
TABLE = toys.table_model(VOCAB)
PAIR = toys.toy_pair(VOCAB, 5, distance=0.8)
PARAMS = ModelParams(jnp.asarray(PAIR.target), jnp.asarray(PAIR.drafter))
PROMPTS = [[a, b] for a in range(4) for b in range(4)]
SHAPE = {"links": 3, "siblings": (2, 1, 3)}
FREE = {"drafter_cost": 0.05, "verification_times": (1.0,) * 16}
WIDTHS = (4, 16)


def plain_texts(target, params, prompts=PROMPTS):
    return texts(target, no_drafter(), params, static(), rejection(), prompts, {}, widths=(1,))[0]


@pytest.mark.often(1)
@pytest.mark.parametrize("verifier", [traversal(), rejection(), greedy(), block()])
def test_greedy_texts_are_those_of_plain_decoding_in_fewer_rounds_than_the_chains(verifier):
    own = model(TABLE, MOST, catch_up=4)
    chain, alone = texts(TABLE, own, PARAMS, static(), verifier, PROMPTS, {"draft_length": 3})
    found, state = texts(TABLE, own, PARAMS, comb(), verifier, PROMPTS, SHAPE, WIDTHS)
    assert found == chain == plain_texts(TABLE, PARAMS)
    assert num_siblings(state) > 20 and total(state, "num_rounds") < total(alone, "num_rounds")
    emitted = total(state, "num_accepted_tokens") + total(state, "num_rounds")
    assert 0 <= emitted - total(state, "num_emitted_tokens") <= len(PROMPTS)  # a text may end within a round


def a_reader():
    target, params, drafter, own = reading_pair()
    return target, reading(drafter, MOST), ModelParams(params, own)


def a_draft_vocabulary():
    """A model that is sure of its tokens; its own weights with noise draft: their second choice is often right."""
    config = llama.LlamaConfig(64, 32, 48, 2, 2, 2, 16, max_position_embeddings=256)
    params = llama.init_params(config, jax.random.key(0), jnp.float32)
    params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, params)
    noisy = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    target = llama.language_model(config, jnp.float32)
    own = ModelParams(params, reduce_params(target, noisy, range(0, 64, 2)))
    return target, model(with_reduced_head(target), MOST), own


@pytest.mark.seldom
@pytest.mark.parametrize("pair", [a_reader, a_draft_vocabulary])
@pytest.mark.parametrize("policy", [comb(), survival_tree(siblings=3), update_every(survival_tree(siblings=3))])
def test_models_with_attention_write_the_targets_text(pair, policy):
    """Positions, masks, moved cache slots and the drafter's own cache: a wrong one changes the rounds after it."""
    target, drafter, both = pair()
    prompts, hyperparameters = [[5], [7, 3], [9, 1, 4], [2] * 6], SHAPE if policy.name == "comb" else FREE
    found, state = texts(target, drafter, both, policy, rejection(), prompts, hyperparameters, WIDTHS)
    assert found == plain_texts(target, both, prompts)
    assert num_siblings(state, "draft") > 20


@pytest.mark.seldom
@pytest.mark.parametrize("policy", [comb(), survival_tree(siblings=3)])
def test_next_to_lookups_a_model_draws_siblings_and_a_lookup_none(policy):
    both = multi_drafter((model(TABLE, MOST, catch_up=4), prompt_lookup(MOST, shortest=2, vocab_size=VOCAB)))
    own, hyperparameters = ModelParams(PARAMS.target, (PARAMS.drafter, None)), SHAPE if policy.name == "comb" else FREE
    found, counts = texts(TABLE, both, own, policy, rejection(), PROMPTS, hyperparameters)
    assert found == plain_texts(TABLE, PARAMS)
    assert num_siblings(counts, "draft") > 0 and num_siblings(counts) > 5
    lookups = total(counts, "num_rounds") - total(counts, "drafter_passes")
    assert lookups > 0 or total(counts, "drafted_at") > total(counts, "drafter_passes")


@pytest.mark.seldom
@pytest.mark.optimised
def test_several_models_draw_siblings_of_their_own_distributions():
    """One joined source has each row's own distribution: siblings of another, or of none, change what is written."""
    both = multi_drafter((model(TABLE, MOST, catch_up=4), model(TABLE, MOST, catch_up=4)), decay=0.5)
    decoder = build_decoder(TABLE, both, comb(), rejection(), prefill_chunk=4)
    own = ModelParams(PARAMS.target, (PARAMS.drafter, jnp.asarray(toys.toy_pair(VOCAB, 9).drafter)))
    options = {"policy_hyperparameters": SHAPE, "tokens": 4, "sequences": 20_480, "batch": 2048}
    assert tested_by_sampling(decoder, own, **options).lossless


def test_a_drafters_cache_has_no_entry_of_the_draft_that_an_accepted_sibling_replaced():
    """With one, texts are right and later drafts worse: a cache of the table holds the tokens that were fed."""
    decoder = build_decoder(TABLE, model(TABLE, MOST, catch_up=4), comb(), rejection(), verification_widths=(11,))
    state = decoder.prefill(PARAMS, PROMPTS, policy_hyperparameters=SHAPE, max_new_tokens=24, record_rounds=24)
    while not np.asarray(state.done).all():
        state = decoder.run(PARAMS, state, rounds=1)
        below = np.arange(state.tokens.shape[1]) < np.asarray(state.drafter.valid)[:, None]
        np.testing.assert_array_equal(np.where(below, state.drafter.cache.tokens - state.tokens, 0), 0)
        assert (state.drafter.valid >= state.length - 1 - MOST).all()
    assert num_siblings(state) > 20


CASES = {
    "comb": (comb(), SHAPE, rejection()),
    "comb, block": (comb(), SHAPE, block()),
    "comb, traversal": (comb(), SHAPE, traversal()),
    "comb that reads": (comb(), {"links": 3, "siblings": (1, 2)}, rejection()),
    "survival": (survival_tree(siblings=2), FREE, rejection()),
}


def sampled(case, sequences=16_384):
    policy, hyperparameters, verifier = CASES[case]
    shape = {"toy": 3, "reads": case == "comb that reads", "distance": 1.5, "widths": (13,)}
    decoder, params = toy_decoder(policy, verifier, 4, 4, **shape)
    options = {"tokens": 4, "sequences": sequences, "batch": 2048, "seed": 5}
    options["warp"] = {"temperature": 0.7 if case == "comb, block" else 1.0}
    return tested_by_sampling(decoder, params, policy_hyperparameters=hyperparameters, **options)


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("case", CASES)
def test_sampled_texts_have_the_targets_distribution(case):
    assert sampled(case).lossless


def off_by_one(*pass_of):
    fed, positions, mask = real_inputs(*pass_of)
    return fed, positions, jnp.roll(mask, 1, axis=2)


real_inputs = rounds.tree_inputs
WRONG = {  # the function of a round, what a mistake makes of it
    "a sibling's mask off by one": ("tree_inputs", off_by_one),
    "a cache slot that stays": ("with_slot_moved", lambda cache, source, slot: cache),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_combs_are_found_out(what, monkeypatch):
    """The negative controls: each is a mistake that a comb can hold without any error. p is 0 with 8192 already."""
    monkeypatch.setattr(rounds, *WRONG[what])
    assert not sampled("comb", 2048).lossless


def draft_of(lengths):
    tokens = jnp.arange(1, 4, dtype=jnp.int32)[None, :] + jnp.array([[10], [20]])
    others = 100 * tokens[:, :, None] + jnp.arange(1, 3, dtype=jnp.int32)[None, None, :]
    return Draft(tokens, None, jnp.zeros(tokens.shape, bool), jnp.array(lengths)), others


def test_rows_of_different_shapes_lie_in_one_pass():
    draft, others = draft_of([3, 1])
    tree = TreeDraft(*draft, others, jnp.array([[0, 2, 1], [2, 0, 0]]))
    tokens, positions, mask = map(np.asarray, rounds.tree_inputs(jnp.array([10, 20]), tree, jnp.array([5, 2]), 8, 16))
    assert tokens[0, :7].tolist() == [10, 11, 12, 13, 1201, 1202, 1301]
    assert tokens[1, :4].tolist() == [20, 21, 2101, 2102]
    assert positions[0, :7].tolist() == [5, 6, 7, 8, 7, 7, 8] and positions[1, :4].tolist() == [2, 3, 3, 3]
    seen = [np.flatnonzero(line).tolist() for line in mask[0, :7]]
    assert seen[4] == [*range(7), 9] and seen[5] == [*range(7), 10] and seen[6] == [*range(8), 11]
    assert seen[3] == list(range(9)) and tree.places.tolist() == [6, 3]


def test_siblings_that_do_not_fit_and_those_of_chosen_tokens_are_left_out():
    (draft, others), wanted, free = draft_of([3, 2]), jnp.array([[5, 1], [1, 1]]), jnp.array([9, 9])
    assert TreeDraft.of(draft, others, wanted, free).sibling_counts.tolist() == [[2, 1, 0], [1, 1, 0]]
    few = TreeDraft.of(draft, others, wanted, jnp.array([2, 0]))
    assert few.sibling_counts.tolist() == [[2, 0, 0], [0, 0, 0]]
    chosen = draft._replace(one_hot=jnp.array([[True, False, False]] * 2))
    assert TreeDraft.of(chosen, others, wanted, free).sibling_counts.tolist() == [[0, 1, 0], [0, 1, 0]]


BLOOM = bloom.language_model(bloom.example_config())
test_what_is_refused = refusals(
    (lambda: (TABLE, prompt_lookup()), comb(), "prompt_lookup draws none"),
    (lambda: (BLOOM, model(BLOOM, MOST)), comb(), "its attention goes by cache slots"),
    (lambda: (TABLE, model(TABLE, MOST)), comb().replace(siblings=0), "must have siblings of 1 or more with `besi"),
    (lambda: (TABLE, model(TABLE, MOST)), comb().replace(beside=None), "must have siblings of 1 or more with `b"),
    by=lambda make, policy: build_decoder(*make(), policy, rejection(), verification_widths=(5, 8)),
)


def test_a_rule_of_trees_learns_from_a_chain_as_from_a_tree_without_siblings():
    """Its `update` may read what only trees have: proofs of chains must not take that away."""
    seen = []

    def update(state, draft, result):
        seen.append((draft.sibling_counts.sum(), result.extra_tokens.sum(), result.emitted.tolist()))
        return state

    chain = comb().replace(update=update).as_chain()
    assert chain.drafts_chains
    draft, _ = draft_of([3, 1])
    chain.update(chain.init(2), draft, VerificationResult(jnp.zeros((2, 4), jnp.int32), jnp.array([2, 1])))
    assert seen == [(0, 0, [2, 1])]


EXACT = 1e-12
EXACT_COSTS = {"drafter_cost": 0.05, "verification_times": (1.0,) * 8}
WARPS = [{"temperature": t} | more for t, more in ((1.0, {}), (0.6, {"top_k": 2}), (1.0, {"min_p": 0.3}), (0.0, {}))]
COMB, SURVIVAL = comb(links=2, siblings=(1, 2)), survival_tree(siblings=2, **EXACT_COSTS)


@pytest.mark.often(4)
@pytest.mark.parametrize(("policy", "verifier"), itertools.product((COMB, SURVIVAL), (rejection, block, traversal)))
def test_combs_are_exact(policy, verifier, monkeypatch):
    accepted, real = [], enumeration.ends_of_round

    def noted(setting, *round_of):
        ends = real(setting, *round_of)
        accepted.append(setting.siblings.sum())
        return ends

    monkeypatch.setattr(hooks, "ends_of_round", noted)
    toys = TOYS if policy is COMB else TOYS[1:2]  # a rule that weighs has ten times as many states
    assert distance(policy, verifier(), WARPS, toys) < EXACT
    assert max(accepted) > 0.1  # siblings are accepted, and not only allowed


def left_out(*asked, real=enumeration.with_siblings):
    branches, draft = real(*asked)
    first = (np.asarray(draft.siblings)[:, :1, 0] == 0) & (np.arange(draft.sibling_counts.shape[1]) == 0)
    return branches, draft._replace(sibling_counts=np.where(first, 0, draft.sibling_counts))


def picked_beside_0(rows, is_greedy, depth, index, real=enumeration._drawn_next):
    picked = rows.left**8 if index == 0 else rows.left
    sure = rows.left[:, :1] == 0  # the draft was token 0
    return real(rows._replace(left=np.where(sure, picked, rows.left)), is_greedy, depth, index)


def drawn_again(v, token, instead, real=siblings.without):
    return real(v, token, 1.0) if instead == 1.0 else v


MISTAKES = {  # the function, what it becomes, siblings, verifier
    "no sibling where the first is token 0": (enumeration, "with_siblings", left_out, 1, rejection()),
    "a sibling that goes by the draft's token": (enumeration, "_drawn_next", picked_beside_0, 1, rejection()),
    "a rejected candidate that comes again": (siblings, "without", drawn_again, 2, rejection()),
    "a prefix that forgets a rejection": (siblings, "after_rejection", lambda p, q, w: (p, w), 1, traversal()),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_with_siblings_are_found_out(what, monkeypatch):
    """The negative controls of the enumeration."""
    module, name, wrong, count, verifier = MISTAKES[what]
    monkeypatch.setattr(module, name, wrong)
    enumeration.decided.cache_clear()
    found = distance(comb(count, links=2, siblings=(1, count)), verifier, WARPS, TOYS[:1])
    enumeration.decided.cache_clear()
    assert found > 1e-5
