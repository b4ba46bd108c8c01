"""What the tests of stopping rules feed them: distributions, outcomes, and whole rounds of a batch without a model."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from jax import lax

from specdec_jax.decoding.sampling import distribution, make_warp
from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Distribution, Draft, RoundContext, VerificationResult

K, VOCAB = 7, 30
ROUNDS, ROWS, MOST = 60, 12, 5
TEMPERATURES = [0.0, 1.0, 0.6, 1.4] * (ROWS // 4)
DISTRIBUTION = jax.jit(distribution)  # its branches would be compiled anew by every call


def context(rows, temperature=0.0, budget=K, emitted=0):
    zeros = jnp.zeros(rows, jnp.int32)
    warp = jax.tree.map(jnp.asarray, make_warp(rows, temperature))
    seed = jnp.arange(rows, dtype=jnp.uint32)
    return RoundContext(zeros + 4, zeros + emitted, zeros + jnp.asarray(budget), zeros == 0, seed, warp, ())


def outcome(drafted, accepted, most=K):
    drafted, accepted = np.asarray(drafted, np.int32), np.asarray(accepted, np.int32)
    rows = len(drafted)
    draft = Draft(jnp.zeros((rows, most), jnp.int32), None, jnp.zeros((rows, most), bool), jnp.asarray(drafted))
    return draft, VerificationResult(jnp.zeros((rows, most + 1), jnp.int32), jnp.asarray(accepted + 1))


def distribution_of_entropies(rows, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, VOCAB)) * rng.uniform(0, 6, (rows, 1))
    return DISTRIBUTION(jnp.asarray(logits, jnp.float32), make_warp(rows, temperature)), logits


class Seen(NamedTuple):
    """What a rule may read of one position, from the logits alone."""

    entropy: float
    raw_entropy: float
    max_prob: float
    raw_max_prob: float
    token_prob: float


class Story(NamedTuple):
    """Rounds of rows at several temperatures: every position's distribution, its token, and whether it is accepted."""

    distributions: Distribution  # leaves [ROUNDS, MOST, ROWS, ...]
    tokens: np.ndarray  # [ROUNDS, MOST, ROWS]
    hits: np.ndarray  # [ROUNDS, MOST, ROWS] bool
    budgets: np.ndarray  # [ROUNDS, ROWS]
    seen: list  # [round][position][row] of Seen


@functools.cache
def story():
    rng = np.random.default_rng(4)
    shape = (ROUNDS, MOST, ROWS)
    logits = (rng.normal(size=(*shape, VOCAB)) * rng.uniform(0, 6, (*shape, 1))).astype(np.float32)
    warp = make_warp(ROUNDS * MOST * ROWS, np.tile(np.float32(TEMPERATURES), ROUNDS * MOST))
    distributions = jax.tree.map(
        lambda leaf: np.asarray(leaf).reshape(*shape, *leaf.shape[1:]),
        jax.jit(distribution)(logits.reshape(-1, VOCAB), warp),
    )
    tokens, seen = np.zeros(shape, np.int32), np.empty(shape, object)
    for place in np.ndindex(shape):
        temperature, raw = TEMPERATURES[place[2]], oracles.softmax(logits[place].astype(np.float64))
        read = oracles.warp(logits[place], temperature) if temperature > 0 else raw
        tokens[place] = rng.choice(VOCAB, p=read) if temperature > 0 else np.argmax(raw)
        seen[place] = Seen(oracles.entropy(read), oracles.entropy(raw), read.max(), raw.max(), read[tokens[place]])
    chances = np.array([value.token_prob for value in seen.ravel()]).reshape(shape)
    hits = rng.uniform(size=shape) < 0.3 + 0.7 * chances
    budgets = np.where(rng.uniform(size=(ROUNDS, ROWS)) < 0.2, rng.integers(0, MOST, (ROUNDS, ROWS)), MOST)
    return Story(distributions, tokens, hits, budgets, seen.tolist())


@functools.partial(jax.jit, static_argnums=0)
def decode_round(policy, state, now, distributions, tokens, hits):
    """One round as the draft loop and the decoder play it. Leaves of the lists are [MOST, ROWS, ...]."""
    begins, state = policy.begin(state, now)
    zeros = jnp.zeros_like(now.budget)

    def one(carry, given):
        state, going, drafted, passes = carry
        distribution, token = given
        wants, after = policy.check(state, distribution, drafted, now)
        state, passes, drawn = select_rows(going, after, state), passes + going.astype(jnp.int32), going & wants
        drafted = drafted + drawn.astype(jnp.int32)
        goes_on, after = policy.proceed(state, distribution, token, drafted, now)
        going = drawn & goes_on & (drafted < now.budget)
        return (select_rows(drawn, after, state), going, drafted, passes), None

    start = (state, begins & (now.budget > 0), zeros, zeros)
    (state, _, drafted, passes), _ = lax.scan(one, start, (distributions, tokens))
    run = jnp.sum(jnp.cumprod(hits.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
    accepted, shown = jnp.minimum(run, drafted), policy.threshold(state)
    blank = jnp.zeros((len(zeros), MOST + 1), jnp.int32)
    draft = Draft(blank[:, :MOST], None, blank[:, :MOST] > 0, drafted)
    state = policy.update(state, draft, VerificationResult(blank, accepted + 1))
    return state, (drafted, passes, accepted, shown)


def play_rows(policy, hyperparameters):
    """Every round of the story: (drafted, passes, accepted, shown) [ROUNDS, ROWS] each, and the last state."""
    told, state, rounds = story(), jax.tree.map(jnp.asarray, policy.init(ROWS, **hyperparameters)), []
    for index in range(ROUNDS):
        now = context(ROWS, TEMPERATURES, told.budgets[index].astype(np.int32), emitted=index)
        distributions = jax.tree.map(lambda leaf, at=index: leaf[at], told.distributions)
        state, happened = decode_round(policy, state, now, distributions, told.tokens[index], told.hits[index])
        rounds.append(jax.tree.map(np.asarray, happened))
    return [np.stack(column) for column in zip(*rounds, strict=True)], state


def play_twin(twin, row):
    """The same rounds of one row, by a plain-Python rule."""
    told, rounds = story(), []
    for index in range(ROUNDS):
        going = twin.begins(row, index)
        budget, drafted, passes = int(told.budgets[index, row]), 0, 0
        going = going and budget > 0
        while going:
            seen = told.seen[index][passes][row]
            passes += 1
            if not twin.draws(seen, drafted):
                break
            drafted += 1
            going = twin.goes_on(seen, drafted) and drafted < budget
        run = int(np.argmin(np.append(told.hits[index, :, row], False)))
        accepted, shown = min(run, drafted), twin.shown()
        twin.learns(drafted, accepted, MOST)
        rounds.append((drafted, passes, accepted, shown))
    return [np.array(column) for column in zip(*rounds, strict=True)]
