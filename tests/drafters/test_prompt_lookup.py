"""Prompt lookup finds what a loop over the text finds, drafts as the policy allows, and changes no output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_once

from specdec_jax import lossless
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.statistics import recorded_rounds, summarise
from specdec_jax.drafters._lookup import right_or_wrong
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.prompt_lookup import find, prompt_lookup
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import adaedl, draft_and_verify, static
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import RoundContext
from specdec_jax.verification import block, greedy, rejection

pytestmark = pytest.mark.slow


def looked_up(text, longest, shortest, most):
    """(draft, tokens matched) of one text, by loops."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):  # the token after the match, the latest first
            if text[end - size : end] == text[-size:]:
                copy = list(text)
                for _ in range(most):
                    copy.append(copy[end + len(copy) - len(text)])
                return copy[len(text) :], size
    return [], 0


def context_of(lengths, budgets, temperature=0.0):
    batch = len(lengths)
    return RoundContext(
        length=jnp.array(lengths, jnp.int32),
        emitted=jnp.zeros((batch,), jnp.int32),
        budget=jnp.array(budgets, jnp.int32),
        alive=jnp.ones((batch,), bool),
        policy_seed=jnp.zeros((batch,), jnp.uint32),
        warp=jax.tree.map(jnp.asarray, make_warp(batch, temperature)),
        monitor=(),
    )


def proposed(drafter, texts, budgets, slots=40, policy=None, **hyperparameters):
    """(Draft, Drafted) of one round on those texts."""
    rng, policy = np.random.default_rng(0), policy or static()
    tokens = rng.integers(0, 4, (len(texts), slots)).astype(np.int32)  # what lies beyond a text must not matter
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    now, state = context_of([len(text) for text in texts], budgets), policy.init(len(texts), **hyperparameters)
    return draft_once(drafter, None, (), jnp.array(tokens), now, policy, state)[:2]


@pytest.mark.parametrize(("longest", "shortest", "vocab"), [(3, 1, 4), (5, 2, 3), (2, 2, 6), (1, 1, 12)])
def test_drafts_are_what_a_loop_finds(longest, shortest, vocab):
    """Random texts of all lengths, one to the whole of the slots; rows side by side."""
    rng, slots = np.random.default_rng(vocab), 24
    texts = [rng.integers(0, vocab, n).tolist() for n in [*range(1, slots + 1), *range(1, slots + 1)]]
    drafter = prompt_lookup(5, longest, shortest)
    draft, info = proposed(drafter, texts, [5] * len(texts), slots, draft_length=5)
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    _, matched = find(jnp.array(tokens), jnp.array([len(t) for t in texts], jnp.int32), longest, shortest)
    sizes = set()
    for row, text in enumerate(texts):
        expected, size = looked_up(text, longest, shortest, 5)
        assert draft.tokens[row, : int(draft.length[row])].tolist() == expected, text
        assert int(matched[row]) == size
        sizes.add(size)
    assert sizes == {0, *range(shortest, longest + 1)}
    assert draft.log_q is None and bool(np.all(draft.one_hot))
    assert drafter.source(None, (), jnp.array(tokens), context_of([1] * len(texts), [5] * len(texts))).cost == 0


def test_budget_policy_and_finished_rows_bound_a_draft():
    texts, drafter = [[1, 1, 1, 1]] * 4, prompt_lookup(4)
    draft, _ = proposed(drafter, texts, [0, 1, 3, 4], draft_length=4)
    assert draft.length.tolist() == [0, 1, 3, 4]
    draft, _ = proposed(drafter, texts, [4] * 4, draft_length=[1, 2, 3, 4])
    assert draft.length.tolist() == [1, 2, 3, 4]
    now = context_of([4], [4])._replace(alive=jnp.array([False]))
    args = (None, (), jnp.ones((1, 8), jnp.int32), now, static(), static().init(1))
    assert draft_once(drafter, *args)[0].length.tolist() == [0]


def test_policies_see_a_longer_match_as_less_uncertain():
    """Matches of 1, 2 and 3 tokens; three tokens into a copy it is three tokens longer."""
    texts = [[5, 1, 6, 1], [5, 1, 2, 6, 1, 2], [5, 1, 2, 3, 6, 1, 2, 3]]
    _, info = proposed(prompt_lookup(3), texts, [3] * 3, draft_length=3)
    long = np.arange(3)[:, None] + 1 + np.arange(3)[None, :]
    chance = (long + 0.5) / (long + 1)
    np.testing.assert_allclose(info.max_prob, chance, rtol=1e-6)
    entropy = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))
    np.testing.assert_allclose(info.entropy, entropy, rtol=1e-5)
    drafts, _ = proposed(prompt_lookup(3), texts, [3] * 3, policy=adaedl())
    assert drafts.length.tolist() == [0, 0, 3]  # AdaEDL at its defaults trusts three tokens
    certain, info = proposed(prompt_lookup(3, uncertainty=False), texts, [3] * 3, policy=adaedl())
    assert certain.length.tolist() == [3, 3, 3]
    assert np.all(info.max_prob == 1) and np.all(info.entropy == 0)


def test_the_distribution_for_policies_is_a_distribution():
    distribution = right_or_wrong(jnp.array([2, 0], jnp.int32), jnp.array([0.75, 1.0], jnp.float32), 5)
    assert distribution.log_prob is not None
    np.testing.assert_allclose(np.exp(distribution.log_prob), [[0.0625, 0.0625, 0.75, 0.0625, 0.0625], [1, 0, 0, 0, 0]])
    np.testing.assert_allclose(distribution.margin, [0.5, 1.0])
    chances = jnp.linspace(0.01, 1.0, 100)
    uncertainty = np.asarray(right_or_wrong(jnp.zeros((100,), jnp.int32), chances, None).entropy)
    # more certain means less entropy, below one half too
    assert np.all(np.diff(uncertainty) < 0) and uncertainty[-1] == 0
    assert right_or_wrong(jnp.array([2]), jnp.array([0.5]), None).log_prob is None


def greedy_texts(drafter, prompts, verifier, slots=64, **options):
    small, tables = table_model(6), toy_pair(6, 3)
    decoder = build_decoder(small, drafter, static(), verifier, prefill_chunk=4)
    params = ModelParams(tables.target)
    state = decoder.prefill(params, prompts, max_new_tokens=30, slots=slots, **options)
    return decoder.run(params, state)


def test_greedy_output_is_plain_decodings_to_the_last_slot():
    """Slots just suffice for prompt, new tokens and the widest verification; rows end at different times."""
    prompts = [[0, 1], [3, 2, 5, 4, 3, 2], [1]]
    needed = 6 + 30 + 5
    state = greedy_texts(prompt_lookup(4), prompts, greedy(), slots=needed)
    plain = greedy_texts(no_drafter(), prompts, rejection(), slots=needed)
    for row, prompt in enumerate(prompts):
        end = len(prompt) + 30
        assert state.tokens[row, :end].tolist() == plain.tokens[row, :end].tolist()
    figures = summarise(jax.tree.map(np.asarray, state.statistics))
    assert figures["num_accepted_tokens"] > 20 and figures["drafter_passes"] == 0
    assert figures["num_emitted_tokens"] == 90  # the budget holds: no row goes past its limit


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("verifier", [rejection(), block()], ids=["rejection", "block"])
def test_the_whole_decoder_is_lossless(verifier):
    """Chi-square of what is drawn, with a rule that reads the drafted token's probability and adapts."""
    policy = draft_and_verify()
    decoder = build_decoder(table_model(3), prompt_lookup(3, vocab_size=3), policy, verifier, prefill_chunk=4)
    params, prompt = ModelParams(toy_pair(3, 0).target), [0, 1, 2, 0, 1]
    hyperparameters = {"step": 0.9, "threshold_decay": 0.2, "threshold": 0.3}
    report = lossless.test_by_sampling(
        decoder, params, prompt, sequences=16_384, policy_hyperparameters=hyperparameters
    )
    assert report.lossless and report.cells > 40, report
    state = decoder.prefill(
        params, [prompt] * 64, max_new_tokens=8, warp=make_warp(64, 1.0), policy_hyperparameters=hyperparameters
    )
    drafted = np.asarray(decoder.run(params, state).statistics.num_draft_tokens)
    assert drafted.sum() > 64  # a decoder that never drafts proves nothing


def test_a_repeated_paragraph_is_accepted_from_the_prompt(smollm2):
    """On real text, greedy: more tokens come from the copy than from the target alone."""
    paragraph = (
        "The lighthouse at Marrow Point was built in 1873 by a crew of forty masons. Its lamp burned whale oil for "
        "eleven years, then kerosene, and the keeper climbed two hundred and six steps every evening to light it."
    )
    pair = build_pair(smollm2, "prompt_lookup", policy=static(draft_length=7), max_draft_length=7)
    prompt = f"Repeat this paragraph word for word:\n\n{paragraph}"
    result = generate(prompt, SamplingParams(max_new_tokens=64), pair=pair, record=True)
    assert result.statistics["num_accepted_tokens"] > 32, result.text
    assert result.statistics["drafter_passes"] == 0


def test_rounds_are_recorded_with_what_policies_saw():
    state = greedy_texts(prompt_lookup(4), [[1, 2, 1, 2]], rejection(), record_rounds=30)
    first = recorded_rounds(state)[0]
    assert first["drafted"] == 4 and first["proposed"].tolist() == [1, 2, 1, 2] and first["drafter_passes"] == 0
    np.testing.assert_allclose(first["max_prob"], [2.5 / 3, 3.5 / 4, 4.5 / 5, 5.5 / 6], rtol=1e-6)


def test_a_source_is_looked_in_as_if_the_text_went_on_from_it():
    """Each row's own, and never what pads it: no token is below zero."""
    drafter, tokens = prompt_lookup(3), np.full((3, 12), 7, np.int32)
    for row, source in enumerate(([9, 5, 6, 7, 8, 1], [5, 6, 4, 3, 2, 30, 31, 1], [1])):
        tokens[row, : len(source)] = source
    state = drafter.init(None, 3, 8, (jnp.asarray(tokens), jnp.asarray([6, 8, 1], jnp.int32)))
    texts = jnp.asarray([[0, 5, 6, 0, 0, 0, 0, 0], [0, 44, 5, 6, 0, 0, 0, 0], [0, 7, 7, 0, 0, 0, 0, 0]], jnp.int32)
    now = context_of([3, 4, 3], [3, 3, 3])
    draft, *_ = draft_once(drafter, None, state, texts, now, static(), static().init(3))
    assert draft.tokens.tolist() == [[7, 8, 1], [4, 3, 2], [7, 7, 7]] and draft.length.tolist() == [3, 3, 3]
    alone = drafter.init(None, 3, 8)
    draft, *_ = draft_once(drafter, None, alone, texts, now, static(), static().init(3))
    assert draft.length.tolist() == [0, 0, 3]
