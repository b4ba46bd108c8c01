"""Combs and trees in the whole decoder: siblings, those that are drafted on, their children, and what is emitted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comb_texts import beside, by_sampling, sharp_pair, texts, total
from tiny_llama import noisy_pair
from tiny_reading import logits_of_drafts, reading_pair

from specdec_jax.contrib.trees import (
    Children,
    Extras,
    TreeDraft,
    comb,
    draft_loop,
    expansion,
    hooks,
    layout,
    rounds,
    siblings,
    survival_tree,
    traversal,
)
from specdec_jax.contrib.trees.sources import expanding
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding import rounds as chain_rounds
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import DRAFT, make_warp, uniforms
from specdec_jax.drafters import model, multi_drafter, prompt_lookup
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.reading import reading
from specdec_jax.lossless import test_by_sampling as tested_by_sampling
from specdec_jax.lossless import toys
from specdec_jax.models import bloom, mistral
from specdec_jax.stopping import static, update_every
from specdec_jax.stopping._survival_state import forecast
from specdec_jax.types import Draft, RoundContext, VerificationResult
from specdec_jax.verification import block, greedy, rejection

pytestmark = pytest.mark.slow

VOCAB, MOST = 8, 4
TABLE = toys.table_model(VOCAB)
PAIR = toys.toy_pair(VOCAB, 5, distance=0.8)
PARAMS = ModelParams(jnp.asarray(PAIR.target), jnp.asarray(PAIR.drafter))
PROMPTS = [[a, b] for a in range(4) for b in range(4)]
SHAPE = {"links": 3, "siblings": (2, 1, 3), "children": 2}
FREE = {"drafter_cost": 0.05, "verification_times": (1.0,) * 16}
WIDTHS = (2, 4, 8, 16)


def taken(state):
    """Rounds by how many tokens were accepted beside the chain: 0, a sibling, a child too."""
    record = state.record
    played = np.asarray(record.emitted) > 0
    return np.bincount(np.maximum(np.asarray(record.emitted - record.accepted)[played] - 1, 0), minlength=3)


@pytest.mark.often(1)
@pytest.mark.parametrize("verifier", [rejection(), greedy(), traversal(), block()])
def test_greedy_texts_are_those_of_plain_decoding_in_fewer_rounds(verifier):
    """A comb takes fewer rounds than its chain, and a tree fewer than its comb."""
    plain, _ = texts(TABLE, no_drafter(), PARAMS, static(), rejection(), PROMPTS, {}, widths=(1,))
    own = model(TABLE, MOST, catch_up=4)
    chain, alone = texts(TABLE, own, PARAMS, static(), verifier, PROMPTS, {"draft_length": 3})
    beside_chain, flat = texts(TABLE, own, PARAMS, comb(), verifier, PROMPTS, SHAPE, WIDTHS)
    found, state = texts(TABLE, own, PARAMS, comb(expanded=2), verifier, PROMPTS, SHAPE, WIDTHS)
    assert found == beside_chain == chain == plain
    assert beside(flat) > 20 and taken(flat)[2] == 0 and taken(state)[2] > 20
    assert total(state, "num_rounds") < total(flat, "num_rounds") < total(alone, "num_rounds")
    for one in (flat, state):  # the last round of a text may end before its last token
        emitted = total(one, "num_accepted_tokens") + total(one, "num_rounds")
        assert 0 <= emitted - total(one, "num_emitted_tokens") <= len(PROMPTS)


COMBS = [comb(), survival_tree(siblings=3), update_every(survival_tree(siblings=3))]


@pytest.mark.seldom
@pytest.mark.parametrize("policy", [*COMBS, comb(expanded=2), survival_tree(siblings=3, expanded=2)])
def test_models_that_read_their_target_write_its_text(policy):
    """Positions, masks, moved cache slots and the drafter's own cache: a wrong one changes the rounds after it."""
    target, params, drafter, own = reading_pair()
    prompts, both = [[5], [7, 3], [9, 1, 4], [2] * 6], ModelParams(params, own)
    hyperparameters = SHAPE if policy.name == "comb" else FREE
    plain, _ = texts(target, no_drafter(), both, static(), rejection(), prompts, {}, widths=(1,))
    found, state = texts(target, reading(drafter, MOST), both, policy, rejection(), prompts, hyperparameters, WIDTHS)
    assert found == plain
    assert beside(state, "draft") > 20


@pytest.mark.seldom
@pytest.mark.parametrize("policy", [comb(), survival_tree(siblings=3)])
def test_beside_lookups_a_model_draws_siblings_and_a_lookup_none(policy):
    plain, _ = texts(TABLE, no_drafter(), PARAMS, static(), rejection(), PROMPTS, {}, widths=(1,))
    both = multi_drafter((model(TABLE, MOST, catch_up=4), prompt_lookup(MOST, shortest=2, vocab_size=VOCAB)))
    own = ModelParams(PARAMS.target, (PARAMS.drafter, None))
    hyperparameters = SHAPE if policy.name == "comb" else FREE
    found, counts = texts(TABLE, both, own, policy, rejection(), PROMPTS, hyperparameters)
    assert found == plain
    assert beside(counts, "draft") > 0 and beside(counts) > 5
    lookups = total(counts, "num_rounds") - total(counts, "drafter_passes")
    assert lookups > 0 or total(counts, "drafted_at") > total(counts, "drafter_passes")


@pytest.mark.seldom
@pytest.mark.optimised
def test_several_models_draw_siblings_of_their_own_distributions():
    """One joined source has each row's own distribution: siblings of another, or of none, change what is written."""
    both = multi_drafter((model(TABLE, MOST, catch_up=4), model(TABLE, MOST, catch_up=4)), drift=0.3)
    decoder = build_decoder(TABLE, both, comb(), rejection(), prefill_chunk=4)
    own = ModelParams(PARAMS.target, (PARAMS.drafter, jnp.asarray(toys.toy_pair(VOCAB, 9).drafter)))
    options = {"policy_hyperparameters": SHAPE, "tokens": 4, "sequences": 20_480, "batch": 2048}
    assert tested_by_sampling(decoder, own, **options).lossless


@pytest.mark.seldom
@pytest.mark.parametrize("policy", [comb(), comb(expanded=1), update_every(survival_tree(siblings=3, expanded=1))])
def test_a_model_that_drafts_for_a_noisy_copy_of_itself_takes_siblings_and_children(policy):
    """Its own weights with noise draft: their second choice is often the text's."""
    target, params, noisy = sharp_pair()
    prompts, both = [[5], [7, 3], [9, 1, 4]], ModelParams(params, noisy)
    hyperparameters = SHAPE if policy.name == "comb" else FREE
    plain, _ = texts(target, no_drafter(), both, static(), rejection(), prompts, {}, widths=(1,))
    found, state = texts(target, model(target, MOST), both, policy, rejection(), prompts, hyperparameters, WIDTHS)
    assert found == plain
    assert beside(state) > 3 if policy == comb() else taken(state)[2] > 0


def proposed(target, drafter, params, policy, hyperparameters, prompt):
    """The draft of the first round after a prompt, as the drafter makes it."""
    decoder = build_decoder(target, drafter, policy, rejection(), verification_widths=WIDTHS, prefill_chunk=4)
    warp = make_warp(1, temperature=1.0)
    options = {"policy_hyperparameters": hyperparameters, "stop_ids": (), "max_new_tokens": 20}
    state = decoder.prefill(params, [prompt], warp=warp, seed=[3], **options)
    context = chain_rounds.round_context(decoder.parts, state)
    source = drafter.source(params.drafter, state.drafter, state.tokens, context)
    source, predict_beside = expanding(source, drafter, params.drafter, context, state.tokens.shape[1])
    log_q = chain_rounds.empty_log_q(source, 1, MOST, target.spec.vocab_size, True)
    uniform = lambda index: uniforms(state.key, context.emitted, index, DRAFT)  # noqa: E731
    return draft_loop.draft(source, predict_beside, policy, state.policy, context, uniform, MOST, log_q)


def expanded_texts(draft):
    """Of every expanded sibling the draft up to it, and which expansion it is."""
    parent, siblings = np.asarray(draft.children.parent)[0], np.asarray(draft.siblings)[0]
    for index in np.flatnonzero(parent >= 0):
        depth, candidate = divmod(int(parent[index]), siblings.shape[1])
        yield [*np.asarray(draft.chain.tokens)[0, :depth].tolist(), int(siblings[depth, candidate])], int(index)


def test_children_are_drawn_from_what_the_drafter_says_after_the_sibling():
    """A mask, a position or a read that is wrong leaves texts right and drafts worse: nothing else would say so."""
    target, params, drafter, own = reading_pair()
    prompt = [9, 1, 4, 2, 7]
    both = ModelParams(params, own)
    draft = proposed(target, reading(drafter, MOST), both, comb(expanded=2), {**SHAPE, "links": 4}, prompt)
    seen = list(expanded_texts(draft))
    assert len(seen) >= 4 and {len(text) for text, _ in seen} >= {1, 2}
    for text, index in seen:
        logits = logits_of_drafts(target, params, drafter, own, prompt + text, len(prompt), len(text) + 1)
        expected = jax.nn.log_softmax(logits[len(text)])
        np.testing.assert_allclose(np.asarray(draft.children.log_q)[0, index], expected, atol=2e-4)


def test_children_of_a_plain_model_too():
    target, params, noisy = noisy_pair(noise=0.3)
    prompt, both = [9, 1, 4, 2, 7], ModelParams(params, noisy)
    draft = proposed(target, model(target, MOST), both, comb(expanded=1), {**SHAPE, "links": 4}, prompt)
    seen = list(expanded_texts(draft))
    assert len(seen) == 3
    for text, index in seen:
        logits, _ = target.apply(noisy, jnp.asarray([prompt + text]), target.init_cache(noisy, 1, 64))
        expected = jax.nn.log_softmax(logits[0, -1])
        np.testing.assert_allclose(np.asarray(draft.children.log_q)[0, index], expected, atol=2e-4)


def test_a_drafters_cache_has_no_entry_of_the_draft_that_an_accepted_sibling_replaced():
    """With one, texts are right and later drafts worse: a cache of the table holds the tokens that were fed."""
    decoder = build_decoder(TABLE, model(TABLE, MOST, catch_up=4), comb(), rejection(), verification_widths=(11,))
    state = decoder.prefill(PARAMS, PROMPTS, policy_hyperparameters=SHAPE, max_new_tokens=24, record_rounds=24)
    while not np.asarray(state.done).all():
        state = decoder.run(PARAMS, state, rounds=1)
        below = np.arange(state.tokens.shape[1]) < np.asarray(state.drafter.valid)[:, None]
        np.testing.assert_array_equal(np.where(below, state.drafter.cache.tokens - state.tokens, 0), 0)
        assert (state.drafter.valid >= state.length - 1 - MOST).all()
    assert beside(state) > 20


CASES = {
    "tree": (comb(expanded=1), {**SHAPE, "siblings": (2, 1)}, False),
    "tree that reads": (comb(expanded=2), {**SHAPE, "siblings": (1, 2)}, True),
    "survival with children": (survival_tree(siblings=2, expanded=1), FREE, False),
    "comb": (comb(), {"links": 3, "siblings": (2, 1, 3)}, False),
    "comb that reads": (comb(), {"links": 3, "siblings": (1, 2)}, True),
    "survival": (survival_tree(siblings=2), FREE, False),
}


def sampled(case, verifier=rejection, **warp):
    return by_sampling(*CASES[case], verifier(), **warp)


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("case", CASES)
def test_sampled_texts_have_the_targets_distribution(case):
    assert sampled(case).lossless
    if case == "tree":
        assert sampled(case, traversal, temperature=0.7).lossless
    if case == "comb":
        assert sampled(case, block, temperature=0.7).lossless
        assert sampled(case, traversal).lossless


def child_off_by_one(before, draft, start, width, slots):
    """A child sees the place before its sibling's."""
    found = layout.tree_inputs(before, draft, start, width, slots)
    place = jnp.arange(width)[None, :] - 1 - layout.places(draft._replace(children=None))[:, None]
    return found._replace(mask=jnp.where((place >= 0)[:, :, None], jnp.roll(found.mask, -1, axis=2), found.mask))


def off_by_one(before, draft, start, width, slots):
    found = layout.tree_inputs(before, draft, start, width, slots)
    return found._replace(mask=jnp.roll(found.mask, 1, axis=2))


def forgetful(*asked):
    """The verifier forgets that a rejected candidate cannot come again; what is drawn stays as it is."""
    real = siblings.without
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(siblings, "without", lambda v, token, instead: v if instead == 0.0 else real(v, token, instead))
        return siblings.outcomes(*asked)


def sibling_alone(real):
    return lambda cache, start, accepted, path: real(
        cache, start, accepted, path._replace(length=jnp.minimum(path.length, 1))
    )


WRONG = {  # case, the function of a round, what a mistake makes of it
    "a mask off by one": ("tree", "tree_inputs", lambda real: child_off_by_one),
    "a child's cache slot that stays": ("tree", "_moved", sibling_alone),
    "children of another sibling": (
        *("tree", "child_of"),
        lambda real: lambda children, sibling: jnp.roll(real(children, sibling), 1),
    ),
    "a sibling's mask off by one": ("comb", "tree_inputs", lambda real: off_by_one),
    "verified as with replacement": ("comb", "outcomes", lambda real: forgetful),
    "a cache slot that stays": ("comb", "with_slot_moved", lambda real: lambda cache, source, slot: cache),
}


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("what", WRONG)
def test_wrong_trees_are_found_out(what, monkeypatch):
    """The negative controls: each is a mistake that a comb or a tree can hold without any error."""
    case, name, wrong = WRONG[what]
    monkeypatch.setattr(rounds, name, wrong(getattr(rounds, name)))
    assert not sampled(case).lossless


def draft_of(lengths, beside, children=None):
    tokens = jnp.arange(1, 4, dtype=jnp.int32)[None, :] + jnp.array([[10], [20]])
    others = 100 * tokens[:, :, None] + jnp.arange(1, 3, dtype=jnp.int32)[None, None, :]
    beside = None if beside is None else jnp.array(beside)
    return TreeDraft(tokens, None, jnp.zeros(tokens.shape, bool), jnp.array(lengths), others, beside, children)


def children_of(parent, count):
    tokens = jnp.arange(1000, 1000 + 4 * len(parent[0]), dtype=jnp.int32).reshape(2, len(parent[0]), 2)
    return Children(jnp.array(parent), tokens, None, jnp.array(count))


def test_rows_of_different_shapes_lie_in_one_pass():
    draft = draft_of([3, 1], [[0, 2, 1], [2, 0, 0]])
    found = layout.tree_inputs(jnp.array([10, 20]), draft, jnp.array([5, 2]), 8, 16)
    first, second = np.asarray(found.tokens)
    assert first.tolist()[:7] == [10, 11, 12, 13, 1201, 1202, 1301] and second.tolist()[:4] == [20, 21, 2101, 2102]
    assert np.asarray(found.positions)[0, :7].tolist() == [5, 6, 7, 8, 7, 7, 8]
    assert np.asarray(found.positions)[1, :4].tolist() == [2, 3, 3, 3]
    seen = [np.flatnonzero(line).tolist() for line in np.asarray(found.mask)[0, :7]]
    assert seen[4] == [*range(7), 9] and seen[5] == [*range(7), 10] and seen[6] == [*range(8), 11]
    assert seen[3] == list(range(9)) and layout.places(draft).tolist() == [6, 3]
    place = layout.place_of(draft, jnp.array([[1], [0]]), jnp.array([[2], [1]]))
    assert place.tolist() == [[5], [2]]


def test_siblings_that_do_not_fit_and_those_of_chosen_tokens_are_left_out():
    draft = draft_of([3, 2], [[0] * 3] * 2)
    wanted = Extras(jnp.array([[5, 1], [1, 1]]))
    assert layout.truncated(draft, wanted, jnp.array([9, 9])).sibling_counts.tolist() == [[2, 1, 0], [1, 1, 0]]
    assert layout.truncated(draft, wanted, jnp.array([2, 0])).sibling_counts.tolist() == [[2, 0, 0], [0, 0, 0]]
    chosen = draft._replace(one_hot=jnp.array([[True, False, False]] * 2))
    assert layout.truncated(chosen, wanted, jnp.array([9, 9])).sibling_counts.tolist() == [[0, 1, 0], [0, 1, 0]]


def test_children_lie_behind_all_siblings_and_see_their_own():
    draft = draft_of([3, 1], [[1, 2, 0], [2, 0, 0]], children_of([[0, 3], [1, -1]], [[2, 1], [1, 0]]))
    found = layout.tree_inputs(jnp.array([10, 20]), draft, jnp.array([5, 2]), 12, 24)
    first, second = np.asarray(found.tokens)
    assert first.tolist()[:10] == [10, 11, 12, 13, 1101, 1201, 1202, 1000, 1001, 1002]
    assert second.tolist()[:5] == [20, 21, 2101, 2102, 1004]
    assert np.asarray(found.positions)[0, :10].tolist() == [5, 6, 7, 8, 6, 7, 7, 7, 7, 8]
    assert np.asarray(found.positions)[1, :5].tolist() == [2, 3, 3, 3, 4]
    seen = [np.flatnonzero(line).tolist() for line in np.asarray(found.mask)[0, :10]]
    assert seen[7] == [*range(6), 9, 12] and seen[8] == [*range(6), 9, 13]  # after the sibling of the first draft
    assert seen[9] == [*range(7), 11, 14]  # after the second sibling of the second draft
    assert np.flatnonzero(np.asarray(found.mask)[1, 4]).tolist() == [0, 1, 2, 5, 6]
    assert layout.places(draft).tolist() == [9, 4]
    place = layout.place_of_child(draft, jnp.array([1, 0]), jnp.array([1, 1]))
    assert place.tolist() == [9, 4]


def test_children_of_siblings_that_are_not_verified_are_left_out():
    draft = draft_of([3, 3], None, children_of([[3, 0], [1, -1]], [[0, 0]] * 2))
    wanted = Extras(jnp.array([[1, 1, 0], [2, 0, 0]]), jnp.full((2, 2), 2))
    found = layout.truncated(draft, wanted, jnp.array([9, 3]))
    assert found.sibling_counts.tolist() == [[1, 1, 0], [2, 0, 0]]
    assert found.children.count.tolist() == [[0, 2], [1, 0]]  # the second sibling is not verified; one place is left
    found = layout.truncated(draft, wanted, jnp.array([1, 1]))
    assert found.sibling_counts.tolist() == [[1, 0, 0]] * 2 and found.children.count.tolist() == [[0, 0]] * 2


def test_the_best_siblings_are_expanded_once():
    worth = jnp.array([[[0.5, 0.3], [0.4, 0.0], [0.9, 0.9]]])

    def chosen(parent, drafted, count=2):
        return expansion.to_expand(worth, jnp.array([parent]), jnp.array([drafted]), count)[0].tolist()

    assert chosen([-1, -1], 2) == [0, 2]  # the third draft is not made yet
    assert chosen([-1, -1], 0) == [-1, -1]
    assert chosen([0, 2], 2) == [1, -1]  # once; what is worth nothing is not expanded
    assert chosen([0, -1], 3, count=3) == [4, 5, 2]


def test_survival_ranks_children_beside_siblings():
    policy = survival_tree(siblings=2, positions=8, expanded=1)
    state = policy.init(1, verification_times=[1.0] * 5 + [3.0] * 4)
    predicted = jnp.asarray([[0.9, 0.5, 0.9, *[0.9] * 5]], jnp.float32)
    state = state._replace(policy=state.policy._replace(predicted=predicted, forecast=forecast(state.policy)))
    one = jnp.ones(1, jnp.int32)
    context = RoundContext(10 * one, one, 4 * one, one > 0, one, make_warp(1), ())
    worth = np.asarray(policy.expand(state, 3 * one, context))[0]
    assert np.unravel_index(worth.argmax(), worth.shape) == (1, 0) and not worth[3:].any()
    parent = jnp.array([[2, 4, -1]])  # those of the second and of the third draft
    asked = policy.beside(state, 3 * one, 5 * one, context, parent)
    assert asked.siblings[0, :3].tolist() == [0, 1, 0] and not asked.children.any()  # one place is free
    settings = state.policy.settings._replace(verification=jnp.ones((1, 9)))
    free = state._replace(policy=state.policy._replace(settings=settings))
    asked = policy.beside(free, 3 * one, 5 * one, context, parent)
    assert asked.children[0, 0] >= 1 and int(asked.siblings.sum() + asked.children.sum()) == 5
    assert asked.children[0, 1] <= asked.siblings[0, 2] * 2  # none without its sibling


@pytest.mark.seldom
def test_greedy_rows_beside_sampled_ones_write_the_targets_text():
    own = model(TABLE, MOST, catch_up=4)
    hot = np.where(np.arange(len(PROMPTS)) % 2, 1.0, 0.0)
    plain, _ = texts(TABLE, no_drafter(), PARAMS, static(), rejection(), PROMPTS, {}, widths=(1,))
    found, state = texts(TABLE, own, PARAMS, comb(expanded=1), rejection(), PROMPTS, SHAPE, WIDTHS, temperature=hot)
    assert found[::2] == plain[::2] and found[1::2] != plain[1::2]
    assert taken(state)[2] > 10


def by_slot(family):
    return family.language_model(family.example_config())


def in_window():
    """A drafter with a window, and a target without one that reads as far."""
    window = by_slot(mistral)
    return TABLE.replace(spec=window.spec), model(window, MOST)


def own():
    return model(TABLE, MOST)


@pytest.mark.parametrize(
    ("make", "policy", "message"),
    [
        (lambda: (TABLE, prompt_lookup()), comb(), "prompt_lookup draws none"),
        (lambda: (by_slot(bloom), model(by_slot(bloom), MOST)), comb(), "its attention goes by cache slots"),
        (lambda: (by_slot(mistral), model(by_slot(mistral), MOST)), comb(), "its attention goes by cache slots"),
        (in_window, comb(expanded=1), "its attention goes by cache slots"),
        (
            lambda: (TABLE, multi_drafter((own(), prompt_lookup(MOST, shortest=2, vocab_size=VOCAB)))),
            *(comb(expanded=1), "comb wants siblings expanded, and multi_drafter cannot read"),
        ),
        (lambda: (TABLE, own()), comb(expanded=9), "9 siblings a pass expanded, more than 8, the widest verification"),
        (lambda: (TABLE, own()), comb().replace(expanded=1), "must have siblings of 1 or more with `beside`, and `exp"),
        (lambda: (TABLE, own()), comb(expanded=1).replace(expand=None), "with `beside`, and `expand` as"),
    ],
)
def test_what_is_refused(make, policy, message):
    with pytest.raises(ValueError, match=message):
        build_decoder(*make(), policy, rejection(), verification_widths=(5, 8))


@pytest.mark.seldom
@pytest.mark.parametrize("most", [1, MOST])
def test_a_drafter_with_a_draft_vocabulary_expands_siblings(most):
    """Of rounds of one draft there are none to expand."""
    target, params, noisy = sharp_pair()
    own, both = with_reduced_head(target), ModelParams(params, reduce_params(target, noisy, range(0, 64, 2)))
    prompts = [[5], [7, 3], [9, 1, 4]]
    plain, _ = texts(target, no_drafter(), both, static(), rejection(), prompts, {}, widths=(1,))
    found, state = texts(target, model(own, most), both, comb(expanded=2), rejection(), prompts, SHAPE, WIDTHS)
    assert found == plain
    assert (taken(state)[2] > 0) == (most > 1) and beside(state) > 0


def test_a_rule_of_trees_learns_from_a_chain_as_from_a_tree_without_siblings():
    """Its `update` may read what only trees have: proofs of chains must not take that away."""
    seen = []

    def update(state, draft, result):
        seen.append((draft.sibling_counts.sum(), result.extra_tokens.sum(), result.emitted.tolist()))
        return state

    tokens = jnp.zeros((2, 3), jnp.int32)
    draft = Draft(tokens, None, tokens > 0, jnp.array([3, 1]))
    result = VerificationResult(jnp.zeros((2, 4), jnp.int32), jnp.array([2, 1]))
    chain = hooks.as_chain(comb().replace(update=update))
    assert chain.rounds is None
    chain.update(chain.init(2), draft, result)
    assert seen == [(0, 0, [2, 1])]
