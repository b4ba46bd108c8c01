"""Log-probabilities of emitted tokens are the scores of the text, however it was decoded; and phases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from refusals import refusals
from stopping_cases import play_rows, story
from tiny_t5 import padded
from tiny_t5 import write_pair as write_t5

from specdec_jax import SamplingParams, build_decoder, build_pair, generate, make_warp, stream
from specdec_jax.app.file_command import result_line
from specdec_jax.contrib.trees import comb
from specdec_jax.decoding.sampling import distribution
from specdec_jax.decoding.scoring import score
from specdec_jax.drafters import no_drafter
from specdec_jax.lossless import toy_decoder
from specdec_jax.lossless.toys import table_model
from specdec_jax.monitors import log_probs, phases
from specdec_jax.monitors.phases import observe_token
from specdec_jax.stopping import phase_length, static, survival
from specdec_jax.text.continuous_batching import complete
from specdec_jax.text.generation import prepare
from specdec_jax.types import RoundContext, VerificationResult
from specdec_jax.verification import rejection

PROMPTS = ["hello", "a much longer prompt than that", "42"]
WARPS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.4, "top_k": 20, "min_p": 0.02}]
CLOSE = 2e-4  # float32, passes of other widths


def sampling(size, **more):
    """Of so many tokens, whichever they are."""
    return SamplingParams(max_new_tokens=size, stop_ids=(), **more)


def scores(pair, result, warp):
    """(raw, warped, tempered) of its tokens, by the scorer."""
    text, begin = [*result.prompt_tokens, *result.tokens], len(result.prompt_tokens) - 1
    padded = [[*text, *[0] * (96 - len(text))]]  # texts of any length by one program
    warps = {"temperature": 1.0}, warp, {"temperature": warp["temperature"] or 1.0}
    every = (score(pair.decoder, pair.params, padded, make_warp(1, **one)) for one in warps)
    return [np.asarray(each.log_p)[0, begin : len(text) - 1] for each in every]


def assert_scored(pair, result, warp, atol=CLOSE):
    found = result.log_probs, result.warped_log_probs, result.tempered_log_probs
    assert all(len(each) == len(result.tokens) > 1 for each in found)
    np.testing.assert_allclose(found, scores(pair, result, warp), atol=atol)


@pytest.mark.often(1)
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_they_are_the_scores_and_the_tokens_are_the_same_without_them(tiny, warp):
    asked, options = sampling(24, seed=3, **warp), {"pair": tiny, "chat": False}
    results = generate(PROMPTS, asked, log_probs=True, **options)
    assert sum(result.statistics["num_accepted_tokens"] for result in results) > 10
    for result, plain in zip(results, generate(PROMPTS, asked, **options), strict=True):
        assert_scored(tiny, result, warp)
        assert (plain.tokens, plain.statistics) == (result.tokens, result.statistics)
        assert plain.log_probs is plain.warped_log_probs is None
        with pytest.raises(AssertionError):  # the control: a position off
            assert_scored(tiny, result._replace(log_probs=[*result.log_probs[1:], result.log_probs[0]]), warp)


def test_a_stream_brings_them_by_rounds(tiny):
    asked, options = sampling(24, **WARPS[1]), {"pair": tiny, "chat": False, "log_probs": True}
    chunks = stream(PROMPTS[0], asked, rounds=2, **options)
    seen = [(len(chunk.tokens), chunk.log_probs, chunk.warped_log_probs) for chunk in chunks]
    assert all(size == len(raw) == len(warped) for size, raw, warped in seen) and len(seen) > 2
    result = chunks.result()
    assert sum((raw for _, raw, _ in seen), []) == result.log_probs
    assert sum((warped for *_, warped in seen), []) == result.warped_log_probs
    assert_scored(tiny, result, WARPS[1])


def test_rows_that_are_refilled_keep_nothing_of_who_had_them_before(tiny):
    pair, texts = tiny.with_log_probs().using(policy=survival()), [*PROMPTS, "x", "one more", "and the last"]
    assert pair.with_log_probs() is pair  # not held twice
    asked = [sampling(5 + 7 * i, seed=i, **WARPS[i % 3]) for i in range(len(texts))]
    requests = [prepare(pair, [text], one, chat=False) for text, one in zip(texts, asked, strict=True)]
    for done in complete(pair, requests, batch=2):
        assert_scored(pair, done.result, WARPS[done.index % 3])
        impossible = done.result._replace(warped_log_probs=[-np.inf])  # as of a lossy verifier: JSON has no infinity
        line = result_line(1, {}, impossible, with_tokens=False)
        assert str(done.result.log_probs).encode() in line and b'"warped_log_probs": [null]' in line


@pytest.mark.seldom
def test_siblings_that_are_accepted_have_their_own(tiny):
    options = {"policy": comb(), "max_draft_length": 3, "verification_widths": (2, 4, 12)}
    pair = build_pair(tiny.target, tiny.drafters[0], **options)
    results = generate(PROMPTS, sampling(40, **WARPS[2]), pair=pair, chat=False, log_probs=True)
    for result in results:
        assert_scored(pair, result, WARPS[2])
    counts = [result.statistics for result in results]
    assert max(each["num_accepted_tokens"] - sum(each["acceptance_histogram"][1:]) for each in counts) > 0


@pytest.mark.seldom
def test_an_encoders_answers(tmp_path):
    target, drafter = write_t5(tmp_path)
    pair = build_pair(target, drafter, policy=static(draft_length=3), max_draft_length=3, dtype="float32")
    results = generate(["the cat. a dog?", "sing"], sampling(12, **WARPS[1]), pair=pair, log_probs=True)
    model, params = pair.target.model, pair.params.target
    for result in results:
        text = jnp.asarray([[model.spec.source.first_token, *result.tokens]], jnp.int32)
        source = padded([result.prompt_tokens], 64)
        logits, _ = model.apply(params, text, model.init_cache(params, 1, text.shape[1], source))
        for warp, found in ({"temperature": 1.0}, result.log_probs), (WARPS[1], result.warped_log_probs):
            said = distribution(logits[0, :-1], make_warp(len(result.tokens), **warp)).log_prob
            np.testing.assert_allclose(found, said[np.arange(len(found)), result.tokens], atol=CLOSE)


def test_the_monitor_inside_still_watches(tiny):
    asked, monitor = sampling(30, temperature=1.0), phases(enter=1, leave=0.9, minimum_length=1)
    pair = tiny.using(policy=phase_length(), monitor=monitor)
    plain, result = (generate("hello", asked, pair=pair, chat=False, log_probs=log) for log in (False, True))
    assert result.statistics == plain.statistics and 0 < result.statistics["num_reasoning_tokens"] < 30
    assert log_probs(9, monitor).hyperparameters == monitor.hyperparameters
    assert log_probs(9, monitor).bare == log_probs(9, phases()) != log_probs(8, phases())


HYPERPARAMETERS = {"enter": 1.0, "leave": 0.7, "minimum_length": 3, "decay": 0.6}


def phases_by_hand(entropies, enter, leave, minimum_length, decay):
    """The phase after each token, written as one would say it."""
    phase, running, lasted, found = 0, 0.0, 0, []
    for n, entropy in enumerate(entropies):
        weight = max(1 - decay, 1 / (n + 1))
        running = (1 - weight) * running + weight * entropy
        lasted += 1
        if lasted >= minimum_length and (running > enter if phase == 0 else running < leave):
            phase, lasted = 1 - phase, 0
        found.append(phase)
    return found


@pytest.mark.parametrize("raw", [True, False])
def test_rounds_of_any_length_find_the_phases_of_the_plain_loop(raw):
    """The state after some tokens does not depend on the rounds they came in, nor on what comes after them."""
    rng, monitor, temperatures = np.random.default_rng(0), phases(raw_entropy=raw), np.array([0.6, 1.7])
    logits = rng.normal(0, 1, (2, 40, 7)) * rng.uniform(0, 4, (2, 40, 1))
    prob = np.exp(logits if raw else logits / temperatures[:, None, None])
    prob /= prob.sum(axis=-1, keepdims=True)
    entropies = -np.sum(prob * np.log(prob), axis=-1)
    whole, found = monitor.init(2, **HYPERPARAMETERS), []
    for t in range(24):
        whole = observe_token(whole, jnp.asarray(entropies[:, t], jnp.float32))
        found.append(np.asarray(whole.phase).tolist())
    by_hand = [phases_by_hand(row[:24], **HYPERPARAMETERS) for row in entropies]
    assert np.array(found).T.tolist() == by_hand and {*sum(by_hand, [])} == {0, 1}
    cut, at = monitor.init(2, **HYPERPARAMETERS), np.zeros(2, int)
    context = RoundContext(*[None] * len(RoundContext._fields))._replace(warp=make_warp(2, temperatures))
    observe = jax.jit(monitor.observe)
    for lengths in ([4, 1], [2, 3], [1, 4], [4, 4], [4, 3], [1, 4], [4, 1], [4, 4]):
        block = np.stack([logits[row, at[row] : at[row] + 4] for row in range(2)])
        result = VerificationResult(jnp.zeros((2, 4), jnp.int32), jnp.array(lengths, jnp.int32))
        cut, at = observe(cut, jnp.asarray(block, jnp.float32), result, context), at + lengths
    assert at.tolist() == [24, 24]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, cut)


@functools.cache
def watching(policy):
    return toy_decoder(policy, rejection(), 3, 5, monitor=phases(), distance=0.9)


def decode(policy, **hyperparameters):
    """(the target's table, the final state) of two rows of 40 tokens at temperature 1."""
    decoder, params = watching(policy)
    options = {"max_new_tokens": 40, "seed": 3, "warp": make_warp(2, temperature=1.0), "stop_ids": ()}
    state = decoder.prefill(params, [(0, 1), (2, 3)], record_rounds=40, **options, **hyperparameters)
    return params.target, jax.tree.map(np.asarray, decoder.run(params, state))


WATCH = {"enter": 0.9, "leave": 0.85, "minimum_length": 2, "decay": 0.5}


def test_the_record_says_which_phase_a_round_began_in():
    table, state = decode(static(), monitor_hyperparameters=WATCH)
    seen = set()
    for row in range(2):
        start, text = int(state.prompt_length[row]), state.tokens[row, : int(state.length[row])]
        logits = np.asarray(table, np.float64)[text[start - 2 : -2], text[start - 1 : -1]]
        after = [0, *phases_by_hand([oracles.entropy(oracles.softmax(each)) for each in logits], **WATCH)]
        emitted = state.record.emitted[row, : int(state.statistics.num_rounds[row])]
        wanted = [after[int(emitted[:i].sum())] for i in range(len(emitted))]
        assert state.record.phase[row, : len(wanted)].tolist() == wanted
        seen |= set(wanted)
        assert state.statistics.num_reasoning_tokens[row] == emitted[np.array(wanted) == 1].sum() > 0
    assert seen == {0, 1}


def test_lengths_follow_the_phase():
    lengths = {"routine_length": 3, "reasoning_length": 1}
    _, state = decode(phase_length(), monitor_hyperparameters=WATCH, policy_hyperparameters=lengths)
    for row in range(2):
        rounds = int(state.statistics.num_rounds[row]) - 1  # the last may be cut by the budget
        phase, drafted = state.record.phase[row, :rounds], state.record.drafted[row, :rounds]
        budget = 40 - np.cumsum(np.r_[0, state.record.emitted[row, : rounds - 1]]) - 1
        np.testing.assert_array_equal(drafted, np.minimum(np.where(phase == 0, 3, 1), budget))
        assert set(phase.tolist()) == {0, 1}
    watch, lengths = {"enter": 0.0, "leave": 0.0, "minimum_length": 1}, {"routine_length": 3, "reasoning_length": 0}
    _, state = decode(phase_length(), monitor_hyperparameters=watch, policy_hyperparameters=lengths)
    assert state.record.drafted[0, 1:10].tolist() == [0] * 9 and state.record.drafted[0, 0] == 3


def test_the_rule_inside_plans_within_the_length_of_the_phase():
    within = lambda state, *arguments: (arguments[-1].budget <= 2, state)  # noqa: E731
    inner = static().replace(begin=within, check=within, proceed=within)
    (drafted, *_), _ = play_rows(phase_length(inner), {"routine_length": 2})
    np.testing.assert_array_equal(drafted, np.minimum(story().budgets, 2))


test_what_is_refused = refusals(
    (lambda: phases().init(1, leave=2.0, enter=1.0), "leave must not exceed enter, got leave=2 and enter=1"),
    (lambda: phase_length(phase_length()), "without hyperparameters called reasoning_length and routine_length"),
    (lambda: build_decoder(table_model(5), no_drafter(), phase_length()), "this policy reads phases"),
)
