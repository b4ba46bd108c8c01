"""Combs in the whole decoder: greedy texts are the target's, sampled ones have its distribution, whatever the shape."""

import jax.numpy as jnp
import numpy as np
import pytest
from comb_texts import beside, by_sampling, sharp_pair, texts, total
from tiny_reading import reading_pair

from specdec_jax.contrib.trees import Extras, TreeDraft, comb, layout, rounds, siblings, survival_tree, traversal
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters import model, multi_drafter, prompt_lookup
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.reading import reading
from specdec_jax.lossless import test_by_sampling as tested_by_sampling
from specdec_jax.lossless import toys
from specdec_jax.models import bloom, mistral
from specdec_jax.stopping import static, update_every
from specdec_jax.verification import block, greedy, rejection

pytestmark = pytest.mark.slow

VOCAB, MOST = 8, 4
TABLE = toys.table_model(VOCAB)
PAIR = toys.toy_pair(VOCAB, 5, distance=0.8)
PARAMS = ModelParams(jnp.asarray(PAIR.target), jnp.asarray(PAIR.drafter))
PROMPTS = [[a, b] for a in range(4) for b in range(4)]
SHAPE = {"links": 3, "siblings": (2, 1, 3)}
FREE = {"drafter_cost": 0.05, "verification_times": (1.0,) * 12}


@pytest.mark.often(1)
@pytest.mark.parametrize("verifier", [rejection(), greedy(), block(), traversal()])
def test_greedy_texts_are_those_of_plain_decoding_in_fewer_rounds(verifier):
    plain, _ = texts(TABLE, no_drafter(), PARAMS, static(), rejection(), PROMPTS, {}, widths=(1,))
    own = model(TABLE, MOST, catch_up=4)
    chain, alone = texts(TABLE, own, PARAMS, static(), verifier, PROMPTS, {"draft_length": 3})
    found, counts = texts(TABLE, own, PARAMS, comb(), verifier, PROMPTS, SHAPE)
    assert found == plain == chain
    assert beside(counts) > 20
    assert total(counts, "num_rounds") < total(alone, "num_rounds")
    parts = ("num_accepted_tokens", "num_rounds")
    ended = len(PROMPTS)  # the last round of a text may end before its last token
    assert 0 <= sum(total(counts, name) for name in parts) - total(counts, "num_emitted_tokens") <= ended


@pytest.mark.seldom
@pytest.mark.parametrize("policy", [comb(), survival_tree(siblings=3), update_every(survival_tree(siblings=3))])
def test_models_with_attention_and_rows_of_different_shapes_write_the_targets_text(policy):
    """Positions, masks and the moved cache slot: a wrong one changes what the rounds after it write."""
    target, params, drafter, own = reading_pair()
    prompts, both = [[5], [7, 3], [9, 1, 4], [2] * 6], ModelParams(params, own)
    hyperparameters = SHAPE if policy.name == "comb" else FREE
    plain, _ = texts(target, no_drafter(), both, static(), rejection(), prompts, {}, widths=(1,))
    found, counts = texts(target, reading(drafter, MOST), both, policy, rejection(), prompts, hyperparameters)
    assert found == plain
    assert beside(counts, "draft") > 20


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
def test_a_comb_of_a_model_that_drafts_for_itself_takes_siblings_where_the_draft_is_wrong():
    """Its own weights with noise draft: their second choice is often the text's."""
    target, params, noisy = sharp_pair()
    both, prompts = ModelParams(params, noisy), [[5], [7, 3], [9, 1, 4]]
    plain, _ = texts(target, no_drafter(), both, static(), rejection(), prompts, {}, widths=(1,))
    found, counts = texts(target, model(target, MOST), both, comb(), rejection(), prompts, SHAPE)
    assert found == plain
    assert beside(counts) > 3


CASES = {
    "comb": (comb(), SHAPE, False),
    "comb that reads": (comb(), {"links": 3, "siblings": (1, 2)}, True),
    "survival": (survival_tree(siblings=2), FREE, False),
}


def sampled(case, verifier=rejection, **warp):
    return by_sampling(*CASES[case], verifier(), **warp)


@pytest.mark.seldom
@pytest.mark.optimised
@pytest.mark.parametrize("case", CASES)
def test_sampled_texts_have_the_targets_distribution(case):
    assert sampled(case).lossless
    if case == "comb":
        assert sampled(case, block, temperature=0.7).lossless
        assert sampled(case, traversal).lossless


def off_by_one(before, draft, start, width, slots):
    found = layout.tree_inputs(before, draft, start, width, slots)
    return found._replace(mask=jnp.roll(found.mask, 1, axis=2))


def forgetful(*asked):
    """The verifier forgets that a rejected candidate cannot come again; what is drawn stays as it is."""
    real = siblings.without
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(siblings, "without", lambda v, token, instead: v if instead == 0.0 else real(v, token, instead))
        return siblings.outcomes(*asked)


def unmoved(cache, source, slot):
    del source, slot
    return cache


@pytest.mark.seldom
@pytest.mark.optimised
@pytest.mark.parametrize("what", ["a mask off by one", "verified as with replacement", "a cache slot that stays"])
def test_wrong_combs_are_found_out(what, monkeypatch):
    """The negative controls: each is a mistake that a comb can hold without any error."""
    if what == "a mask off by one":
        monkeypatch.setattr(rounds, "tree_inputs", off_by_one)
    elif what == "verified as with replacement":
        monkeypatch.setattr(rounds, "outcomes", forgetful)
    else:
        monkeypatch.setattr(rounds, "with_slot_moved", unmoved)
    assert not sampled("comb").lossless


def draft_of(lengths, beside):
    tokens = jnp.arange(1, 4, dtype=jnp.int32)[None, :] + jnp.array([[10], [20]])
    others = 100 * tokens[:, :, None] + jnp.arange(1, 3, dtype=jnp.int32)[None, None, :]
    return TreeDraft(tokens, None, jnp.zeros(tokens.shape, bool), jnp.array(lengths), others, jnp.array(beside))


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


def test_what_cannot_have_siblings_is_refused():
    with pytest.raises(ValueError, match="prompt_lookup draws none"):
        build_decoder(TABLE, prompt_lookup(), comb(), rejection())
    for family in (bloom, mistral):
        by_slot = family.language_model(family.example_config())
        with pytest.raises(ValueError, match="its attention goes by cache slots"):
            build_decoder(by_slot, model(by_slot, MOST), comb(), rejection())
