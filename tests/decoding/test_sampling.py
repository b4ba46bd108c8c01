"""Warps against Hugging Face's semantics in numpy, distributions, and drawing from one uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from scipy import stats

from specdec_jax import lossless
from specdec_jax.decoding import sampling
from specdec_jax.decoding.sampling import make_warp, policy_seeds, prompt_hashes, uniforms
from specdec_jax.decoding.state import padded_rows
from specdec_jax.stopping import static
from specdec_jax.verification import rejection

ROWS, VOCAB = 1000, 200


@pytest.fixture(scope="module")
def rows():
    """1,000 rows of logits with numbers of their own; every third row is rounded, so that it is full of ties."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, VOCAB)) * rng.uniform(0.5, 5.0, (ROWS, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2
    numbers = {
        "temperature": rng.choice([0.0, 0.5, 0.8, 1.0, 1.7], ROWS),
        "top_k": rng.choice([0, 1, 2, 5, 50, VOCAB, 10 * VOCAB], ROWS),
        "top_p": rng.choice([1.0, 0.99, 0.9, 0.5, 0.01], ROWS),
        "min_p": rng.choice([0.0, 0.02, 0.3, 1.0], ROWS),
    }
    return logits.astype(np.float32), numbers


@pytest.mark.parametrize("alone", [{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_warps_are_hugging_faces(rows, alone):
    """All numbers together, where more than k tokens are kept if they tie at the k-th place, and one number alone."""
    logits, numbers = rows
    if alone:
        numbers = {"temperature": np.resize([1.0, 0.0, 0.7], ROWS)} | {n: np.full(ROWS, v) for n, v in alone.items()}
    ours = np.exp(np.asarray(jax.jit(sampling.distribution)(logits, make_warp(ROWS, **numbers)).log_prob))
    tied = []
    for row in range(0, ROWS, 7 if alone else 1):
        own = {name: values[row].item() for name, values in numbers.items()}
        theirs = oracles.warp(logits[row].astype(np.float64), **own)
        assert (ours[row] > 0).tolist() == (theirs > 0).tolist(), (row, own)
        np.testing.assert_allclose(ours[row], theirs, rtol=2e-5, atol=1e-7, err_msg=str((row, own)))
        kept = logits[row][theirs > 0]
        if 0 < own.get("top_k", 0) < len(kept):
            tied.append(row)
    assert alone or len(tied) > 30 and all(row % 3 == 0 for row in tied), tied


def test_a_row_is_warped_as_if_alone(rows):
    """Exactly among other neighbours; in a batch of another size up to the order of additions."""
    logits, numbers = rows
    warped = jax.jit(sampling.distribution)
    together = np.asarray(warped(logits, make_warp(ROWS, **numbers)).log_prob)
    turned = {name: np.roll(values, 7) for name, values in numbers.items()}
    moved = np.asarray(warped(np.roll(logits, 7, axis=0), make_warp(ROWS, **turned)).log_prob)
    np.testing.assert_array_equal(np.roll(moved, -7, axis=0), together)
    for row in range(30):
        own = make_warp(1, **{name: values[row] for name, values in numbers.items()})
        alone = warped(logits[row : row + 1], own).log_prob[0]
        np.testing.assert_allclose(alone, together[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0, 0.7)], ids=["greedy", "mixed"])
def test_a_distribution_says_what_rules_read(rows, temperatures):
    logits, temperatures = rows[0][:100], np.resize(temperatures, 100)
    distribution = jax.jit(sampling.distribution)(logits, make_warp(100, temperatures, top_k=20))
    for row, temperature in enumerate(temperatures.tolist()):
        raw = oracles.softmax(logits[row].astype(np.float64))
        seen = raw if temperature == 0 else oracles.warp(logits[row].astype(np.float64), temperature, top_k=20)
        largest, second = np.sort(seen)[-1], np.sort(seen)[-2]
        names = ("entropy", "max_prob", "margin", "raw_entropy", "raw_max_prob")
        expected = [oracles.entropy(seen), largest, largest - second, oracles.entropy(raw), raw.max()]
        np.testing.assert_allclose([getattr(distribution, name)[row] for name in names], expected, rtol=1e-4, atol=1e-6)
        assert distribution.top_token[row] == int(np.argmax(logits[row]))
        if temperature == 0:
            assert np.exp(distribution.log_prob[row]).tolist() == np.eye(VOCAB)[np.argmax(logits[row])].tolist()
    assert sampling.entropy(jnp.zeros((2, 0, 256))).shape == (2, 0)  # of a pass without drafts


@pytest.mark.parametrize("vocab", [3, 128, 129, 1000])
def test_drawing_inverts_the_cumulative_sum(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.uniform(size=(400, vocab)) * (rng.uniform(size=(400, vocab)) < 0.4)
    weights[:, rng.integers(vocab)] = 0.5  # never all zero
    uniform = rng.uniform(size=400).astype(np.float32)
    uniform[:4] = [0.0, np.nextafter(np.float32(1), np.float32(0)), 0.5, 0.0]
    drawn = np.asarray(jax.jit(sampling.draw)(jnp.asarray(weights, jnp.float32), jnp.asarray(uniform)))
    assert (weights[np.arange(400), drawn] > 0).all()
    for row in range(400):
        sums = np.cumsum(weights[row]) / weights[row].sum()
        low, high = sums[drawn[row]] - weights[row, drawn[row]] / weights[row].sum(), sums[drawn[row]]
        assert low - 1e-5 <= uniform[row] <= high + 1e-5, (row, low, uniform[row], high)


def test_drawing_gives_no_token_of_weight_zero_where_rounded_sums_disagree():
    """At the end of a block, whose sum and whose last cumulative sum are rounded otherwise; zeros stand there."""
    rows, rng = 4096, np.random.default_rng(0)
    weights = rng.uniform(size=(rows, 8, 128)).astype(np.float32)
    weights[:, :, 100:] = 0.0
    ends = np.cumsum(weights.sum(axis=2), axis=1)
    uniform = np.minimum(ends[np.arange(rows), rng.integers(0, 8, rows)] / ends[:, -1], 1.0)
    for _ in range(3):  # just below, where the cumulative sum may end before
        uniform = np.nextafter(uniform, np.float32(0))
        drawn = np.asarray(jax.jit(sampling.draw)(jnp.asarray(weights.reshape(rows, -1)), jnp.asarray(uniform)))
        assert (weights.reshape(rows, -1)[np.arange(rows), drawn] > 0).all()


def test_uniforms_differ_by_seed_emitted_position_and_role_and_by_nothing_else():
    grid = [(s, e, p, r) for s in (0, 1, 2**32 - 1) for e in range(4) for p in range(4) for r in range(3)]
    columns = [np.array(column) for column in zip(*grid, strict=True)]
    seeds, emitted, positions = columns[0].astype(np.uint32), columns[1].astype(np.int32), columns[2].astype(np.int32)
    by_role = [np.asarray(sampling.uniforms(*map(jnp.asarray, (seeds, emitted, positions)), r)) for r in range(3)]
    values = [float(by_role[role][i]) for i, (*_, role) in enumerate(grid)]
    assert len(set(values)) == len(grid) and min(values) >= 0 and max(values) < 1
    assert values[-1] == float(sampling.uniforms(seeds[-1:], emitted[-1:], positions[-1:], 2)[0])  # a row alone


TEXTS, SMALL, PROMPT = 1024, 3, [0, 1]


def hashes_of(*texts):
    """The hashes of prompts, or of prompts and sources."""
    return prompt_hashes(*[padded_rows("text", rows, 99) for rows in texts])


def test_hashes_stay_what_they_are():
    """Every text at a seed depends on them."""
    hashes, prompts = [459728077, 459728077, 615005626], np.array([[0, 1, 9], [0, 1, 9], [1, 0, 9]])
    assert hashes_of([[0, 1], [0, 1], [1, 0]]).tolist() == hashes
    assert jax.jit(hashes_of)([jnp.array(prompt) for prompt in ([0, 1], [0, 1], [1, 0])]).tolist() == hashes
    padded = lambda *texts: prompt_hashes(padded_rows("text", *texts))  # noqa: E731
    assert padded(prompts, 99, [2, 2, 2]).tolist() == hashes
    assert jax.jit(padded)(prompts, 99, jnp.array([2, 2, 2])).tolist() == hashes
    assert len(set(hashes_of([[0] * length for length in range(1, 300)]).tolist())) == 299
    assert hashes_of([[0]], [[1]]) != hashes_of([[0, 1]])  # a source counts, and is no part of the prompt


def test_a_seed_alone_stands_for_the_key_with_0():
    seeds, zero = np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32)
    emitted = np.arange(4, dtype=np.int32)
    keys = np.stack([zero, seeds], axis=1)
    np.testing.assert_array_equal(uniforms(keys, emitted, 2, 1), uniforms(seeds, emitted, 2, 1))
    np.testing.assert_array_equal(policy_seeds(keys), policy_seeds(seeds))
    hashed = np.stack([hashes_of([PROMPT] * 4), seeds], axis=1)
    assert not np.any(np.asarray(uniforms(hashed, emitted, 2, 1)) == np.asarray(uniforms(seeds, emitted, 2, 1)))
    assert not np.any(np.asarray(policy_seeds(hashed)) == np.asarray(policy_seeds(seeds)))


def test_the_turns_of_a_conversation_are_independent():
    """The same question twice at one seed: over seeds, the first tokens of both answers have the joint distribution."""
    decoder, params = lossless.toy_decoder(static(), rejection())
    more = {"seed": 0, "warp": make_warp(TEXTS, temperature=1.0), "stop_ids": (), "slots": 64}
    state = decoder.run(params, decoder.prefill(params, [PROMPT] * TEXTS, max_new_tokens=3, **more))
    first = np.asarray(state.tokens)[:, 2]
    asked_again = [[*text, *PROMPT] for text in np.asarray(state.tokens)[:, :5].tolist()]
    state = decoder.run(params, decoder.extend(params, state, asked_again, max_new_tokens=3, **more))
    second = np.asarray(state.tokens)[:, 7]
    logits = np.asarray(params.target, np.float64)[0, 1]
    answer = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    expected = TEXTS * np.outer(answer, answer).ravel()
    observed = np.bincount(first * SMALL + second, minlength=SMALL**2)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert 0.2 < np.mean(first == second) < 0.8
