"""Log-probabilities of emitted tokens are the scores of the text, however it was decoded; and the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llama import noisy_pair
from tiny_pair import write_pair
from tiny_t5 import padded
from tiny_t5 import write_pair as write_t5

import specdec_jax as sd
from specdec_jax.contrib.trees import comb
from specdec_jax.decoding.sampling import log_probabilities, make_warp
from specdec_jax.decoding.scoring import score
from specdec_jax.monitors import log_probs, phases
from specdec_jax.stopping import phase_length, static, survival
from specdec_jax.text.continuous_batching import complete
from specdec_jax.text.generation import build_pair, generate, prepare
from specdec_jax.text.request_file import result_line
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import stream

PROMPTS = ["hello", "a much longer prompt than that", "42"]
WARPS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.4, "top_k": 20, "min_p": 0.02}]
CLOSE = 2e-4  # float32, passes of other widths


def sampling(size, **more):
    """Of so many tokens, whichever they are."""
    return SamplingParams(max_new_tokens=size, stop_ids=(), **more)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folders = write_pair(tmp_path_factory.mktemp("tiny"))
    return build_pair(*folders, policy=static(draft_length=3), max_draft_length=3, dtype="float32")


def scores(pair, result, warp):
    """(raw, warped) of its tokens, by the scorer."""
    text, begin = [*result.prompt_tokens, *result.tokens], len(result.prompt_tokens) - 1
    both = (score(pair.decoder, pair.params, [text], make_warp(1, **one)) for one in ({"temperature": 1.0}, warp))
    return [np.asarray(each.log_p)[0, begin:] for each in both]


def assert_scored(pair, result, warp, atol=CLOSE):
    found = result.log_probs, result.warped_log_probs
    assert all(len(each) == len(result.tokens) > 1 for each in found)
    np.testing.assert_allclose(found, scores(pair, result, warp), atol=atol)


@pytest.mark.often(2)
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
    pair = build_pair(
        *(tiny.target, tiny.drafters[0]), policy=comb(), max_draft_length=3, verification_widths=(2, 4, 12)
    )
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
            said = log_probabilities(logits[0, :-1], make_warp(len(result.tokens), **warp))
            np.testing.assert_allclose(found, said[np.arange(len(found)), result.tokens], atol=CLOSE)


def test_the_monitor_inside_still_watches(tiny):
    asked, monitor = sampling(30, temperature=1.0), phases(enter=1, leave=0.9, minimum_length=1)
    pair = tiny.using(policy=phase_length(), monitor=monitor)
    plain, result = (generate("hello", asked, pair=pair, chat=False, log_probs=log) for log in (False, True))
    assert result.statistics == plain.statistics and 0 < result.statistics["num_reasoning_tokens"] < 30
    assert log_probs(9, monitor).hyperparameters == monitor.hyperparameters
    assert log_probs(9, monitor).bare == log_probs(9, phases()) != log_probs(8, phases())


# The sampler


def test_samples_are_those_of_the_decoder_and_new_parameters_compile_nothing():
    model, params, noisy = noisy_pair()
    drafter, sampling = sd.drafters.model(model, 3), SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.8)
    sample, traced = sd.sampler(model, drafter, sampling, policy=static(), prefill_chunk=4), []

    @jax.jit
    def step(params, drafter_params, prompts, seed):
        traced.append(seed)
        return sample(params, drafter_params, prompts, seed)

    decoder = sd.build_decoder(model, drafter, static(), sd.verification.rejection(), prefill_chunk=4)
    prompts = [[5, 7, 9], [11, 3]]
    for seed, scale in (1, 1.0), (8, 1.1):
        both = [jax.tree.map(lambda leaf, scale=scale: scale * leaf, tree) for tree in (params, noisy)]
        found = step(*both, [np.array(prompt) for prompt in prompts], seed)
        weights, warp = sd.ModelParams(*both), make_warp(2, 0.9, top_p=0.8)
        state = decoder.run(weights, decoder.prefill(weights, prompts, max_new_tokens=10, warp=warp, seed=seed))
        begin, end = np.asarray(state.prompt_length), np.asarray(state.length)
        np.testing.assert_array_equal(found.mask.sum(axis=1), end - begin)
        for row in range(2):
            text = np.asarray(state.tokens)[row, : end[row]]
            np.testing.assert_array_equal(found.tokens[row, found.mask[row]], text[begin[row] :])
            said = score(decoder, weights, text[None], make_warp(1, 0.9, top_p=0.8)).log_p[0, begin[row] - 1 :]
            np.testing.assert_allclose(found.log_probs.warped[row, found.mask[row]], said, atol=CLOSE)
        assert not found.tokens[~found.mask].any() and not found.log_probs.raw[~found.mask].any()
        np.testing.assert_array_equal(sample(*both, prompts, seed).tokens, found.tokens)
    assert len(traced) == 1
    wrong = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), params)
    for name, trees in (("params", (wrong, noisy)), ("drafter_params", (params, wrong))):
        with pytest.raises(ValueError, match=f"^{name}: .* has NaN or infinity in float32"):
            sample(*trees, prompts)
    with pytest.raises(ValueError, match="decodes no text.*stop='x'"):
        sd.sampler(model, drafter, SamplingParams(stop="x"))
