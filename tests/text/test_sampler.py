"""The sampler of a training loop: its tokens, log-probabilities, shapes, distribution and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_llama import noisy_pair, one_pass
from tiny_weights import assert_same_params

import specdec_jax as sd
from specdec_jax.decoding.scoring import score
from specdec_jax.drafters import model, no_drafter
from specdec_jax.lossless.sampled import chi_square
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import static

V, NEW = 5, 8
PROMPTS = [[5, 7, 9, 2], [11], [3, 1]]
PADDED, LENGTHS = np.array([[5, 7, 9, 2, -1], [11, 99, 99, 99, 99], [3, 1, 0, 0, 0]]), np.array([4, 1, 2])
WARPED = sd.SamplingParams(max_new_tokens=10, temperature=0.7, top_k=20, top_p=0.8, stop_ids=(4,))


@functools.cache
def tiny_sampler(sampling=WARPED, **options):
    tiny, params, noisy = noisy_pair()
    return sd.sampler(tiny, model(tiny, 3), sampling, policy=static(), prefill_chunk=4, **options), params, noisy


@functools.cache
def toy_sampler(stop_ids=(), **options):
    sampling = sd.SamplingParams(max_new_tokens=NEW, temperature=1.0, stop_ids=stop_ids)
    small, tables = table_model(V), toy_pair(V)
    return sd.sampler(small, model(small, 3), sampling, policy=static(), **options), tables.target, tables.drafter


def overflowing(params, tokens, cache):
    """The logits of a toy, infinite after token 3."""
    logits, cache = table_model(V).apply(params, tokens, cache)
    return jnp.where((tokens == 3)[:, :, None], jnp.inf, logits), cache


def texts_of(samples):
    """Prompts and their samples, padded."""
    texts = np.zeros((3, 14), np.int32)
    for row, prompt in enumerate(PROMPTS):
        texts[row, : len(prompt) + 10] = [*prompt, *samples.tokens[row]]
    return texts


@pytest.mark.usefixtures("exact_products")
def test_log_probabilities_are_those_of_a_separate_pass():
    tiny, params, noisy = noisy_pair()
    sample, *_ = tiny_sampler()
    samples = sample(params, noisy, PROMPTS, 3)
    decoder = sd.build_decoder(tiny, no_drafter(), static())
    assert samples.mask.any(axis=1).all() and not samples.mask.all() and samples.finite.all()
    accepted, drafts = (int(np.sum(getattr(samples.statistics, f"num_{n}_tokens"))) for n in ("accepted", "draft"))
    assert 0 < accepted < drafts
    texts, new = texts_of(samples), samples.mask
    assert not samples.tokens[~new].any() and not samples.log_probs.tempered[~new].any()
    warps = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    for name, warp in {"raw": {"temperature": 1}, "warped": warps, "tempered": {"temperature": 0.7}}.items():
        log_p = score(decoder, sd.ModelParams(params), texts, sd.make_warp(3, **warp)).log_p
        expected = np.stack([log_p[row, len(prompt) - 1 :][:10] for row, prompt in enumerate(PROMPTS)])
        np.testing.assert_allclose(getattr(samples.log_probs, name)[new], expected[new], atol=1e-5, err_msg=name)


def test_greedy_samples_are_plain_decoding():
    tiny, params, noisy = noisy_pair()
    sampling = sd.SamplingParams(max_new_tokens=10, stop_ids=())
    samples = tiny_sampler(sampling)[0](params, noisy, PROMPTS)
    first_choices = np.argmax(one_pass(tiny, params, texts_of(samples))[0], axis=-1)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(samples.tokens[row], first_choices[row, len(prompt) - 1 :][:10])
    np.testing.assert_allclose(samples.log_probs.tempered, samples.log_probs.raw, atol=1e-5)
    assert not samples.log_probs.warped.any() and int(samples.statistics.num_accepted_tokens.sum()) > 0


def test_padded_prompts_are_lists_of_them():
    """Whatever lies beyond the lengths, concrete or traced."""
    sample, *params = tiny_sampler()
    listed = sample(*params, PROMPTS, 3)
    assert_same_params(listed, sample(*params, PADDED, 3, LENGTHS))
    assert_same_params(listed, sample(*params, jnp.asarray(PADDED), [3, 4, 5], lengths=jnp.asarray(LENGTHS)))
    traced = jax.jit(sample)(*params, PADDED, jax.random.key(3), LENGTHS)
    np.testing.assert_array_equal(traced.tokens, listed.tokens)
    np.testing.assert_allclose(traced.log_probs.raw, listed.log_probs.raw, atol=1e-5)


def test_a_loop_of_other_prompts_and_parameters_compiles_nothing():
    """A width decides the bucket of padded prompts, and the longest prompt that of lists."""
    sample, target, drafter = toy_sampler(n=2)
    events, rng = [], np.random.default_rng(0)
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: events.append(event))
    for step in range(101):
        scaled = [np.float32(1 + step / 100) * table for table in (target, drafter)]
        prompts, low = rng.integers(0, V, (3, 80)), [1, 1, 1] if step % 2 else [60, 30, 1]
        lengths = rng.integers(low, np.add(low, 9))
        sample(*scaled, prompts, 6 * step, lengths)
        sample(*scaled, [prompts[0, : rng.integers(60, 81)].tolist(), *prompts[1:, :9].tolist()], 6 * step)
        if step == 0:
            assert [event for event in events if "compile" in event]  # the control
            events.clear()
    assert not [event for event in events if "compile" in event]


def test_n_samples_of_a_prompt_have_its_distribution_and_prefill_it_once():
    """Chi-square of two tokens, of both prompts, after one of which the drafter's distribution is NaN; a row is that of
    its prompt and seed alone."""
    count, shapes = 4096, []
    small = table_model(V)

    def counted(params, tokens, cache):
        shapes.append(tokens.shape)
        return small.apply(params, tokens, cache)

    watched, tables = small.replace(apply=counted), toy_pair(V)
    sampling = sd.SamplingParams(max_new_tokens=2, temperature=1.0, stop_ids=())
    drafter = model(small.replace(apply=overflowing), 3)
    sample = sd.sampler(watched, drafter, sampling, n=count, policy=static())
    prompts = [[0, 1], [2, 4, 3]]
    samples = sample(tables.target, tables.drafter, prompts, 5)
    assert {rows for rows, width in shapes if width > 4} == {2} and {rows for rows, width in shapes} == {2, 2 * count}
    p = np.asarray(jax.nn.softmax(tables.target), np.float64)
    for tokens, (*_, before, last) in zip(np.asarray(samples.tokens).reshape(2, count, 2), prompts, strict=True):
        joint = p[before, last][:, None] * p[last]
        observed = np.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
        assert chi_square(observed, joint.ravel() * count)[2] > 1e-4
        assert chi_square(observed, np.roll(joint, 1, axis=1).ravel() * count)[2] < 1e-9  # the control
    few = sd.sampler(small, drafter, sampling, policy=static())
    for row in (0, count - 1, count, 2 * count - 1):
        alone = few(tables.target, tables.drafter, [prompts[row // count]], 5 + row)
        np.testing.assert_array_equal(alone.tokens[0], samples.tokens[row])


def test_new_parameters_compile_nothing_inside_a_callers_jit():
    sample, *params = toy_sampler(n=2)
    traced, toy_prompts = [], [[0, 1, 2, 2], [4], [3, 1]]

    @jax.jit
    def step(params, drafter_params, prompts, seed):
        traced.append(seed)
        return sample(params, drafter_params, prompts, seed)

    for seed, scale in (1, 1.0), (8, 1.1), (9, np.nan):
        both = [scale * tables for tables in params]
        found = step(*both, [np.array(prompt) for prompt in toy_prompts], seed)
        assert found.finite.tolist() == [scale == scale] * 6
        if scale == scale:
            np.testing.assert_array_equal(sample(*both, toy_prompts, seed).tokens, found.tokens)
    assert len(traced) == 1


def with_nan(tree):
    return jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), tree)


def test_what_is_not_finite_is_reported():
    sample, params, noisy = tiny_sampler()
    for name, trees in (("params", (with_nan(params), noisy)), ("drafter_params", (params, with_nan(noisy)))):
        with pytest.raises(ValueError, match=f"^{name}: .* has NaN or infinity in float32"):
            sample(*trees, PROMPTS)
    small, tables = table_model(V), toy_pair(V)
    sampling = sd.SamplingParams(max_new_tokens=1, temperature=1.0, stop_ids=())
    broken = sd.sampler(small.replace(apply=overflowing), model(small, 3), sampling, policy=static())
    assert broken(tables.target, tables.drafter, [[1], [3, 2]]).finite.all()
    with pytest.raises(ValueError, match="^row 1: the target's logits have NaN, and its parameters have none"):
        broken(tables.target, tables.drafter, [[1], [2, 3]])


def sampled(*arguments, stop_ids=(), n=1):
    sample, *params = toy_sampler(stop_ids, n=n)
    return sample(*params, *arguments)


test_what_is_refused = refusals(
    (lambda: sampled([[1]], stop_ids=3), r"stop_ids must be a tuple of tokens in \[0, 5\), got 3"),
    (lambda: sampled([[1]], stop_ids=(2, 999)), r"stop_ids.*got \(2, 999\)"),
    (lambda: sampled([[1]], stop_ids=(1.0,)), r"stop_ids.*got \(1.0,\)"),
    (lambda: sampled([[1], [0.5, 2]]), r"prompt 1 must be a sequence of whole numbers, got \[0.5, 2\]"),
    (lambda: sampled([[1], [5]]), "prompt 1 has token 5, outside the vocabulary of 5"),
    (lambda: sampled(np.array([[1, 5, 9]]), 0, [2]), "prompt 0 has token 5"),
    (lambda: sampled([[1, 2]], 0, [1]), r"lengths are those of padded prompts, one array \[rows, slots\], got"),
    (lambda: sampled(np.array([[1, 2]]), 0, [3]), r"lengths must lie in \[1, 2\], got \[3\]"),
    (lambda: sampled(np.array([[1, 2]]), 0, [0]), r"lengths must lie in \[1, 2\], got \[0\]"),
    (lambda: sampled(np.array([[1, 2]] * 3), 0, [1, 2]), r"lengths must be one number, or 3 .*got shape \(2,\)"),
    (lambda: sampled([[1]], [1, 2, 3], n=2), r"seed must be one number, or 2 \(one a row\), got shape \(3,\)"),
    (lambda: jax.jit(sampled)(jnp.ones((1, 1), int), jnp.arange(3)), r"seed must be one number, or 1 .*\(3,\)"),
    (lambda: sampled([[1]], n=0), r"n must lie in \[1, inf\), got 0"),
    (lambda: sampled([[1]], n=1.5), "n must be a whole number, got 1.5"),
    (lambda: toy_sampler()[0](*toy_pair(V)[:2], np.ones((1, 4095), int)), "prompt 0 of 4095 tokens and 8 new ones"),
    (lambda: sd.sampler(table_model(V), no_drafter(), sd.SamplingParams(stop="x")), "decodes no text.*stop='x'"),
)


@pytest.mark.parametrize("call", [toy_sampler, sd.SamplingParams])
def test_an_option_of_other_samplers_is_one_sentence(call):
    name = "sampler" if call is toy_sampler else "SamplingParams"
    with pytest.raises(TypeError, match=f"^{name} has no option 'repetition_penalty' \\(there are: [a-z_, ]*\\)$"):
        call(repetition_penalty=1.1)
