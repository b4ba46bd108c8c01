"""A drafter that reads its target: what it reads belongs to verified positions, and is read at the position after.

Every pass of every round is compared with `distillation.unrolled`, which reads whole texts and keeps no cache: an error
in what is kept, shifted, rolled back or fed again changes a later pass.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_llama import noisy_pair
from tiny_reading import MOST, assert_first_drafts_scored, check_passes, extended, reading_pair

from specdec_jax import ModelParams, build_decoder, make_warp, verification
from specdec_jax.decoding.scoring import score
from specdec_jax.decoding.teacher_forcing import init_caches
from specdec_jax.drafters import model, multi_drafter
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import reading
from specdec_jax.stopping import static
from specdec_jax.types import Hidden

PROMPTS = [[3, 7, 9, 4, 4, 5, 8, 1, 20, 33, 7, 9], [5], [1, 2]]


@pytest.fixture(scope="module")
def pair():
    return reading_pair()


@functools.cache
def decoder_of(target, drafter, **options):
    return build_decoder(target, reading(drafter, MOST, **options), static(draft_length=MOST), verification.rejection())


def played(pair, temperature=1.0, prompts=PROMPTS, new=24, slots=96, **options):
    target, params, drafter, own = pair
    decoder, both = decoder_of(target, drafter, **options), ModelParams(params, own)
    options = {"warp": make_warp(len(prompts), temperature), "record_rounds": new, "stop_ids": [], "seed": 3}
    return decoder, decoder.run(both, decoder.prefill(both, prompts, max_new_tokens=new, slots=slots, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_pass_reads_what_the_target_left_before_the_round(temperature, pair):
    """And reads shifted by one position would be seen."""
    _, state = played(pair, temperature)
    accepted = check_passes(pair, state)
    drafted = int(np.sum(state.statistics.num_draft_tokens))
    assert accepted > 8 and drafted - accepted > 5  # both what is kept and what is rolled back were tried
    for shift in (-1, 1) if temperature else ():
        with pytest.raises(AssertionError):
            check_passes(pair, state, shift=shift)


def test_extend_catches_up_from_what_is_fed_and_what_was_kept(pair):
    """After a text was cut back and went on elsewhere, passes are those of a fresh prefill."""
    state, fresh = extended(pair, decoder_of(pair[0], pair[2]))
    assert check_passes(pair, state) > 4
    np.testing.assert_array_equal(state.tokens, fresh.tokens)


@pytest.mark.seldom
def test_one_of_several_catches_up_from_what_was_kept(pair):
    """Rows choose for themselves: who sat out for some rounds reads what it missed, beside rows that did not."""
    target, params, drafter, own = pair
    _, _, other = noisy_pair(noise=0.04)
    joined = multi_drafter([reading(drafter, MOST), model(target, MOST)], decay=0.5)
    decoder = build_decoder(target, joined, static(draft_length=MOST), verification.rejection())
    both = ModelParams(params, (own, other))
    options = {"max_new_tokens": 40, "record_rounds": 40, "stop_ids": [], "seed": 3}
    state = decoder.prefill(both, PROMPTS, warp=make_warp(3, 1.0), **options)
    state = decoder.run(both, state)
    who = np.asarray(state.record.drafter_id)
    rows = zip(who, state.statistics.num_rounds, strict=True)
    changes = [np.count_nonzero(np.diff(row[: int(count)])) for row, count in rows]
    assert min(changes) > 2 and check_passes(pair, state) > 4


@pytest.mark.seldom
def test_with_a_draft_vocabulary_it_is_the_same_drafter_of_fewer_tokens(pair):
    target, params, drafter, own = pair
    few = np.arange(3, 50, 2)
    reduced, reduced_params = with_reduced_head(drafter), reduce_params(drafter, own, few)
    decoder, state = played((target, params, reduced, reduced_params))
    check_passes(pair, state, tokens=few)
    scored = score(decoder, ModelParams(params, reduced_params), np.asarray(state.tokens)[:, :13])
    text = np.asarray(state.tokens)[0, :13].tolist()
    may = [token in few or token in text[:at] for at, token in enumerate(text)][1:]
    assert np.isfinite(scored.log_q[0]).tolist() == may and not all(may)


def test_score_reads_the_target_at_every_position(pair):
    assert_first_drafts_scored(pair, decoder_of(pair[0], pair[2]), PROMPTS[0])


@pytest.mark.often(1)
@pytest.mark.parametrize("catch_up", [2, 5, 64])
def test_what_is_fed_again_does_not_depend_on_the_size_of_a_pass(catch_up, pair):
    _, state = played(pair, catch_up=catch_up)
    check_passes(pair, state)


@pytest.mark.seldom
def test_long_prompts_are_fed_in_wide_passes(pair):
    """With 192 slots most of the first and third go in 64 tokens a pass, the rest four."""
    target, params, drafter, own = pair
    longer, reader = (model.replace(spec=model.spec._replace(context=512)) for model in (target, drafter))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 60, size).tolist() for size in (150, 1, 70, 49)]
    pair = longer, params, reader, own
    _, state = played(pair, prompts=prompts, new=12, slots=192)
    assert check_passes(pair, state, slots=192) > 4


def with_hidden(target, **changes):
    return target.replace(hidden=target.hidden._replace(**changes))


def of_a_wider_target(drafter):
    return drafter.replace(reading=drafter.reading._replace(target_width=48))


NARROW = r"layers \(0, 1, 2\), 24 wide, and the target has 1 layers, 24 wide; draft"
test_what_cannot_read_or_be_read_is_refused = refusals(
    (lambda pair: decoder_of(pair[0].replace(hidden=Hidden()), pair[2]), "reads hidden states .* target gives none"),
    (lambda pair: decoder_of(with_hidden(pair[0], num_layers=1), pair[2]), NARROW),
    (lambda pair: decoder_of(with_hidden(pair[0], width=48), pair[2]), "24 wide, and the target has 2 layers, 48 wide"),
    (lambda pair: init_caches((with_hidden(pair[0], width=48), pair[2]), pair[1::2], 1, 8), "48 wide"),
    (
        lambda pair: multi_drafter([reading(drafter, MOST) for drafter in (pair[2], of_a_wider_target(pair[2]))]),
        "targets 24 and 48 wide cannot",
    ),
    (lambda pair: pair[2].apply(pair[3], jnp.zeros((1, 2), jnp.int32), None), "decodes nothing alone"),
    (lambda pair: reading(pair[2].replace(reading=None)), "reads no target"),
)


def test_nothing_is_recorded_unless_asked_for(pair):
    """A target whose drafter reads nothing runs the program it ran before."""
    target, params, _, _ = pair
    texts, weights = [], ModelParams(params, params)
    for one in (target, target.replace(hidden=Hidden())):
        decoder = build_decoder(one, model(target, MOST), static(draft_length=MOST), verification.rejection())
        state = decoder.prefill(weights, [[1, 2, 3]], max_new_tokens=4)
        texts.append(decoder.jitted["run"].lower(weights, state, np.int32(9), np.int32(1)).as_text())
    assert texts[0] == texts[1]
