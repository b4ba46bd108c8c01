"""Judging a drafter along texts: against numpy loops over tables, whatever the batches; the target's own answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_oracles import warp
from refusals import refusals
from scripted import tokenizer
from tiny_weights import CONFIG

from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.metrics.judging import answers, judge
from specdec_jax.models.adapters import TokenCache, from_function
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import ModelSpec

VOCAB = CONFIG["vocab_size"]
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)


def bigram(seed: int, size: int = VOCAB, scale: float = 2.0, context: int = 400) -> LoadedModel:
    """A model whose logits depend on the last token and on its position, so that a shifted text is noticed."""

    def init_cache(params, batch, slots):
        return TokenCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def apply(params, tokens, cache):
        slots = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        rows = jnp.arange(tokens.shape[0])[:, None]
        known = cache.tokens.at[rows, slots].set(tokens, mode="drop")
        before = jnp.take_along_axis(known, jnp.maximum(slots - 3, 0), axis=1, mode="clip")  # what a prefill leaves
        table, steps = params
        return table[tokens] + 0.5 * table[before] + steps[slots % 7], TokenCache(known, cache.length + tokens.shape[1])

    rng = np.random.default_rng(seed)
    params = tuple(jnp.asarray(rng.normal(0, scale, (n, size)), jnp.float32) for n in (size, 7))
    spec = ModelSpec(size, context, (2,))
    return LoadedModel(from_function(apply, init_cache, spec), params, tokenizer(), f"bigram {seed}", None)


def texts_of(count: int, longest: int = 150, seed: int = 3) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    sizes = zip(rng.integers(1, longest, count), rng.integers(1, 40, count), strict=True)
    return [tuple(rng.integers(0, VOCAB, size).tolist() for size in pair) for pair in sizes]


def naive(target, drafter, texts):
    agreement, mass = [], []
    tables = [[np.asarray(part, np.float64) for part in model.params] for model in (target, drafter)]
    for prompt, answer in texts:
        text, rows = [*prompt, *answer], []
        for position in range(len(prompt) - 1, len(text) - 1):
            now, before = text[position], text[max(position - 3, 0)]
            pair = [table[now] + 0.5 * table[before] + steps[position % 7] for table, steps in tables]
            missing = len(pair[0]) - len(pair[1])
            pair[1] = np.pad(pair[1], (0, missing), constant_values=-np.inf)
            shared = [np.minimum(*(warp(logits, temperature) for logits in pair)).sum() for temperature in TEMPERATURES]
            rows.append([np.argmax(pair[0]) == np.argmax(pair[1]), *shared])
        agreement.append(np.mean(rows, axis=0)[0])
        mass.append(np.mean(rows, axis=0)[1:])
    return np.array(agreement), np.array(mass)


@pytest.fixture(scope="module")
def near():
    target, other = bigram(0), bigram(1)
    params = tuple(0.75 * one + 0.25 * two for one, two in zip(target.params, other.params, strict=True))
    return target, target._replace(params=params)


def test_against_loops_over_tables(near):
    texts = texts_of(11)
    texts += [([5], [7]), (texts[0][0], [9])]
    agreement, mass = naive(*near, texts)
    assert 0.1 < agreement.mean() < 0.9
    found = judge(*near, texts, temperatures=TEMPERATURES, batch=4, chunk=8)
    np.testing.assert_allclose(found.agreement, agreement, atol=1e-12)
    np.testing.assert_allclose(found.acceptance, mass, atol=2e-5)
    np.testing.assert_allclose(found.acceptance[:, 0], agreement, atol=1e-6)  # at temperature 0 they are the same
    assert found.positions.tolist() == [len(answer) for _, answer in texts]
    assert found.temperatures == TEMPERATURES
    for batch, chunk in ((1, 3), (16, 64)):
        other = judge(*near, texts, temperatures=TEMPERATURES, batch=batch, chunk=chunk)
        np.testing.assert_array_equal(found.agreement, other.agreement)
        np.testing.assert_allclose(found.acceptance, other.acceptance, atol=1e-6)


def test_what_a_drafter_lacks_has_probability_zero():
    target, drafter, texts = bigram(0), bigram(1, scale=0.1), texts_of(4)
    padded = bigram(0, size=VOCAB + 8)._replace(params=tuple(jnp.pad(x, ((0, 0), (0, 8))) for x in target.params))
    agreement, mass = naive(padded, drafter, texts)
    found = judge(padded, drafter, texts, temperatures=TEMPERATURES, batch=4, chunk=8)
    np.testing.assert_allclose(found.agreement, agreement, atol=1e-12)
    np.testing.assert_allclose(found.acceptance, mass, atol=2e-5)


@pytest.mark.parametrize("batch", [1, 3])  # a single row writes its cache another way
def test_llamas_are_judged_by_one_pass_over_the_whole_text(tiny_folders, batch):
    """Caches, prefill and rows that wait: each text alone, in one pass, gives the same distributions."""
    target, drafter = (load_model(path, dtype="float32") for path in tiny_folders)
    passes = [jax.jit(model.apply) for model in (target.model, drafter.model)]
    texts = [([1] * 66 + prompt, answer[: 30 - 4 * index]) for index, (prompt, answer) in enumerate(texts_of(5, 30))]
    found = judge(target, drafter, texts, temperatures=(0.7,), batch=batch, chunk=8)
    for index, (prompt, answer) in enumerate(texts):
        text, distributions = [*prompt, *answer], []
        tokens = jnp.asarray([text + [0] * (128 - len(text))], jnp.int32)
        for one, (model, params, *_) in zip(passes, (target, drafter), strict=True):
            logits, _ = one(params, tokens, model.init_cache(params, 1, 128))
            distributions.append(np.asarray(logits[0, len(prompt) - 1 : len(text) - 1], np.float64))
        same = np.mean(distributions[0].argmax(axis=1) == distributions[1].argmax(axis=1))
        mass = [np.minimum(warp(p, 0.7), warp(q, 0.7)).sum() for p, q in zip(*distributions, strict=True)]
        assert found.agreement[index] == pytest.approx(same)
        assert found.acceptance[index, 0] == pytest.approx(np.mean(mass), abs=1e-4)


@pytest.mark.often(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_those_of_generate_whatever_the_batch(tiny_folders, temperature):
    target = load_model(tiny_folders[0], dtype="float32")
    texts = ["hello", "hello hello and some more words" * 3, "a", "12"]
    prompts = [target.tokenizer.encode(text) for text in texts]
    pair, expected = build_pair(target, None), []
    for row, text in enumerate(texts):
        sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=5 + row)
        expected.append(generate(text, sampling, pair=pair, chat=False, slots=128).tokens)
    options = {"max_new_tokens": 20, "warp": {"temperature": temperature}, "seed": 5}
    assert answers(target, prompts, batch=3, **options) == expected


def test_an_answer_ends_with_the_end_of_its_text():
    """Token t is followed by t - 1 with near certainty, and 2 ends a text."""
    target = bigram(0)
    table = jnp.full((VOCAB, VOCAB), -50.0).at[jnp.arange(VOCAB), jnp.arange(VOCAB) - 1].set(50.0)
    target = target._replace(params=(table, jnp.zeros((7, VOCAB))))
    found = answers(target, [[6], [9, 9, 9, 30], [4, 4, 4, 4, 4]], max_new_tokens=5, batch=2)
    assert found == [[5, 4, 3, 2], [29, 28, 27, 26, 25], [3, 2]]


M = bigram(0)
test_bad_input_is_refused = refusals(
    (lambda: judge(M, M, [([], [1])]), "text 0 has 0 tokens of prompt"),
    (lambda: judge(M, M, [([1], [1]), ([1], [])]), "text 1 has 1 tokens of prompt and 0 of answer"),
    (lambda: judge(M, M, [([1], [VOCAB])]), "outside the vocabulary"),
    (lambda: judge(M, M, [([1] * 390, [1] * 20)]), "text 0 of 410 tokens exceeds the target's context, 400"),
    (lambda: judge(M, M, [([1], [1])], temperatures=()), "at least one temperature"),
    (lambda: judge(M, M, [([1], [1])], temperatures=(-1.0,)), "temperature"),
    (lambda: judge(M, M, [([1], [1])], chunk=0), "chunk must be positive"),
    (lambda: answers(M, [[1], []]), "prompt is empty"),
    (lambda: answers(M, [[1]], max_new_tokens=0), "max_new_tokens must be positive"),
    (lambda: answers(M, [[1]], warp={"temperature": -0.5}), "temperature"),
)


def test_nothing_to_do_is_not_an_error():
    assert answers(bigram(0), []) == [] and judge(bigram(0), bigram(0), []).acceptance.shape == (0, 3)
