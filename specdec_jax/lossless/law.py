"""Proof of a drafter: its tokens have the distribution that it reports, and none is left out for its value.

A draft is a function of the uniforms of its positions. With the others fixed, the uniform of one position is swept over
[0, 1), and the intervals in which each token is drawn are found by bisection. Their lengths must be the probabilities
of `log_q`, as the verifier gets it (`Source.close`), and nothing else may change: neither whether the token is drafted,
nor `log_q`, nor earlier tokens. Chosen tokens are one-hot given the uniform, so they need no test of their law.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import stats

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.rounds import draft_of, empty_log_q
from specdec_jax.decoding.sampling import uniforms
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import take_rows
from specdec_jax.lossless.drawing import Drawing
from specdec_jax.lossless.enumeration import ENDS, PHASES
from specdec_jax.lossless.results import Result
from specdec_jax.lossless.sampled import FALSE_ALARM
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, Drafter, Params, RoundContext, StoppingPolicy

TOLERANCE = 2e-4  # of a total variation; cumulative sums in float32 and the bisection leave about 1e-5
POINTS = 64  # uniforms per call
RESOLUTION = 4e-6  # width of an interval at which the bisection stops
EDGES = (0.25, 0.5, 0.75, 0.9, 0.98, 0.995)  # shares of a reported distribution between which drafts are counted
STEPS = 40  # of a bisection; what is unresolved then counts in the drafter's favour
SLOTS, LONGEST_TEXT = 512, 384  # slots of the text, and its longest beginning


@strategy
def at_random() -> StoppingPolicy:
    """Drafts that end at random after a pass, by `policy_seed`: a drafter's rows have drafts of all lengths."""

    def check(state: Any, distribution: Any, drafted: Array, context: RoundContext) -> tuple[Array, Any]:
        return uniforms(context.policy_seed, context.emitted, drafted, 0) >= ENDS, state

    return StoppingPolicy(lambda batch: (), check=check, hyperparameters={})


class Text(NamedTuple):
    """The rows of a batch at the beginning of a round; leaves are numpy, [B, ...]."""

    tokens: np.ndarray  # [B, SLOTS] int32
    prompt: np.ndarray  # [B] int32
    context: RoundContext


def prove_law(
    drafter: Drafter,
    params: Params,
    drawing: Drawing,
    *,
    vocab_size: int,
    batch: int,
    rounds: int,
    exactly: bool = True,
) -> Result:
    """Rounds of `batch` drawn texts: sweeps of the uniforms, and rows beside others.

    Args:
        params: the drafter's.
        exactly: whether intervals are found by bisection; else tokens are drawn at POINTS random uniforms, counted by
            rank and by id, and what must not change is compared.

    Raises:
        ValueError: a drafter that reads hidden states of its target.
    """
    if drafter.observe is not None:
        raise ValueError(f"{drafter.name} reads hidden states of its target: test it with the decoder")
    longest, rng = drafter.max_draft_length, drawing.rng
    functions = _functions(drafter, vocab_size)
    text, error, sweeps, drafted, drawn = _text(drawing, vocab_size, batch, longest), 0.0, 0, 0, 0
    state, places = functions.fill(params, text.tokens, text.context.length), np.zeros((2, 0))
    for _ in range(rounds):
        numbers = rng.uniform(size=(batch, longest)).astype(np.float32)
        draft, closed = functions.draft(params, state, text.tokens, text.context, numbers)
        draft = jax.tree.map(np.asarray, draft)
        wrong = _beside_others(functions, params, drawing, text, numbers, vocab_size)
        for position in (rng.permutation(longest)[:3] if exactly else [0, longest - 1]) if not wrong else ():
            at = partial(functions.sweep, params, state, text.tokens, text.context, numbers, np.int32(position), draft)
            swept = _swept(at, batch, int(position), None if exactly else rng)
            error, sweeps, wrong = max(error, swept.error), sweeps + batch, swept.wrong
            places = np.concatenate([places, swept.places], axis=1)
            drafted, drawn = drafted + swept.drafted, drawn + swept.drawn
            if wrong:
                break
        if wrong:
            break
        tokens, length = text.tokens.copy(), np.asarray(text.context.length).copy()
        for row in range(batch):  # any number of drafts is accepted, and the next token is any
            accepted = int(rng.integers(0, draft.length[row] + 1))
            new = [*draft.tokens[row, :accepted], rng.choice(tokens[row, : length[row]])][: SLOTS - length[row]]
            tokens[row, length[row] : length[row] + len(new)] = new
            length[row] += len(new)
        context = _context(drawing, length, text.prompt, longest, text.context.warp)
        text = Text(tokens, text.prompt, context)
        state = functions.commit(params, closed, text.tokens, text.context.length)
        if np.any(text.context.length + longest + 1 > SLOTS):
            break
    for name, place in zip(("by probability", "by id"), places, strict=True):  # binomial tests of their shares
        for edge in EDGES if not wrong and places.size else ():
            count, total = int(np.sum(place > edge)), len(place)
            if stats.binomtest(count, total, 1 - edge).pvalue * 2 * len(EDGES) < FALSE_ALARM:
                wrong = f"{count} of {total} drafts lie beyond {edge:g} of the reported distribution, in order {name}"
                break
    return Result(error, {"positions": sweeps, "drafted": drafted, "drawn": drawn}, wrong)


class _Functions(NamedTuple):
    fill: Callable[..., Any]  # (params, tokens, length) -> the drafter's state
    draft: Callable[..., Any]  # (params, state, tokens, context, uniforms [B, K]) -> draft, state
    sweep: Callable[..., Any]
    # (params, state, tokens, context, uniforms [B, K], position, their draft, [POINTS, B]) -> tokens, is_drafted,
    # one_hot, changed, each [POINTS, B], and the draft's log_q [B, V]
    commit: Callable[..., Any]  # (params, state, tokens, length) -> state


def _functions(drafter: Drafter, vocab_size: int) -> _Functions:
    policy, longest = at_random(), drafter.max_draft_length

    def fill(params: Params, tokens: Array, length: Array) -> Any:
        return drafter.fill(params, drafter.init(params, *tokens.shape), tokens, length)

    def draft(params: Params, state: Any, tokens: Array, context: RoundContext, numbers: Array) -> tuple[Draft, Any]:
        source = drafter.source(params, state, tokens, context)
        log_q = empty_log_q(source, len(tokens), longest, vocab_size, True)
        uniform = lambda index: lax.dynamic_index_in_dim(numbers, index, 1, keepdims=False)  # noqa: E731
        closed, loop = source.close(draft_loop.draft(source, policy, (), context, uniform, longest, log_q))
        return draft_of(loop), closed

    def sweep(
        params: Params,
        state: Any,
        tokens: Array,
        context: RoundContext,
        numbers: Array,
        position: Array,
        first: Draft,
        points: Array,
    ) -> Any:
        column, rows = jnp.arange(longest)[None, :] == position, jnp.arange(len(tokens))

        def q_at(drafted: Draft) -> Array:
            empty = jnp.full((len(tokens), 1), -jnp.inf, jnp.float32)  # all are chosen
            return empty if drafted.log_q is None else drafted.log_q[rows, position]

        log_q = q_at(first)

        def compared(point: Array) -> tuple[Array, ...]:
            drafted, _ = draft(params, state, tokens, context, jnp.where(column, point[:, None], numbers))
            is_drafted, one_hot = drafted.length > position, drafted.one_hot[rows, position]
            before = (jnp.arange(longest)[None, :] < position) & (jnp.arange(longest)[None, :] < first.length[:, None])
            changed = jnp.any(before & (drafted.tokens != first.tokens), axis=1)
            changed |= jnp.minimum(drafted.length, position) != jnp.minimum(first.length, position)
            other = jnp.max(jnp.abs(jnp.exp(q_at(drafted)) - jnp.exp(log_q)), axis=1) > 1e-6
            return drafted.tokens[rows, position], is_drafted, one_hot, changed | (is_drafted & ~one_hot & other)

        return *lax.map(compared, points), log_q

    return _Functions(jax.jit(fill), jax.jit(draft), jax.jit(sweep), jax.jit(drafter.commit))


class _Swept(NamedTuple):
    """A sweep of the rows' uniforms of one position."""

    drafted: int  # rows that drafted the position
    drawn: int  # rows that drew its token
    error: float = 0.0  # largest total variation
    wrong: str = ""  # a sentence
    places: np.ndarray = np.zeros((2, 0))  # `_places`


def _swept(at: Callable[[np.ndarray], Any], batch: int, position: int, rng: np.random.Generator | None) -> _Swept:
    """One sweep; with `rng` the uniforms are random, without bisection."""
    points = np.tile(np.linspace(0, 1 - 2**-24, POINTS, dtype=np.float32)[:, None], (1, batch))
    if rng is not None:
        points[1:-1] = rng.random((POINTS - 2, batch), np.float32)
    tokens, is_drafted, one_hot, changed, log_q = map(np.asarray, at(points))
    q = np.exp(log_q.astype(np.float64))
    each: list[Any] = [(points[:, row].astype(np.float64), tokens[:, row]) for row in range(batch)]

    def wrong_with(is_drafted: np.ndarray, one_hot: np.ndarray, changed: np.ndarray) -> str:
        if np.any(is_drafted != is_drafted[:1]):
            return f"whether draft {position + 1} is proposed depends on the token drawn for it"
        if np.any(changed) or np.any(is_drafted & (one_hot != one_hot[:1])):
            return f"earlier drafts or the reported distribution depend on the token drawn for draft {position + 1}"
        return ""

    wrong = wrong_with(is_drafted, one_hot, changed)
    drew = is_drafted[0] & ~one_hot[0]
    swept = _Swept(int(is_drafted[0].sum()), int(drew.sum()), wrong=wrong)
    if wrong or not np.any(drew):
        return swept
    total = np.abs(q[drew].sum(axis=1) - 1.0).max()
    if not total < TOLERANCE:
        wrong = f"the reported distribution of draft {position + 1} sums to 1 + {total:.1e}"
        return swept._replace(error=float(total), wrong=wrong)
    impossible = drew & np.any(np.take_along_axis(q, tokens.T, axis=1) == 0, axis=1)
    if np.any(impossible):
        row = int(np.flatnonzero(impossible)[0])
        token = next(int(t) for t in tokens[:, row] if q[row, t] == 0)
        wrong = f"draft {position + 1} can be token {token}, whose reported probability is 0"
        return swept._replace(error=1.0, wrong=wrong)
    if rng is not None:
        each_places = [_places(tokens[1:-1, row], q[row], rng) for row in np.flatnonzero(drew)]
        return swept._replace(places=np.concatenate(each_places, axis=1))
    for _ in range(STEPS):
        gaps = [_gaps(*each[row]) if drew[row] else np.zeros(0) for row in range(batch)]
        if not any(map(len, gaps)):
            break
        points = np.full((POINTS, batch), 0.5, np.float32)
        for row, middles in enumerate(gaps):
            points[: len(middles), row] = middles
        tokens, is_drafted, one_hot, changed, _ = map(np.asarray, at(points))
        if wrong := wrong_with(is_drafted, one_hot, np.zeros(0)):
            return swept._replace(wrong=wrong)
        for row, middles in enumerate(gaps):
            new = points[: len(middles), row], tokens[: len(middles), row]
            places, drawn = (np.concatenate(pair) for pair in zip(each[row], new, strict=True))
            order = np.argsort(places, kind="stable")
            each[row] = places[order], drawn[order]
    error = max(_distance(each[row][0], each[row][1], q[row]) for row in np.flatnonzero(drew))
    wrong = f"draft {position + 1} is drawn from another distribution than the reported one"
    return swept._replace(error=error, wrong="" if error < TOLERANCE else wrong)


def _places(tokens: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The places [2, N] of drawn tokens in the cumulative sums of q, from the most probable token on and by id.

    They are uniform in [0, 1) and independent for tokens from q: a token's place is drawn within its interval.
    """
    each = []
    for order in (np.argsort(-q, kind="stable"), np.arange(len(q))):
        before = np.empty(len(q))
        before[order] = np.cumsum(q[order]) - q[order]
        each.append(before[tokens] + rng.uniform(size=len(tokens)) * q[tokens])
    return np.stack(each)


def _gaps(places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Uniforms between neighbouring ones with different tokens, the widest gaps first, at most POINTS."""
    width = np.diff(places)
    between = np.flatnonzero((tokens[1:] != tokens[:-1]) & (width > RESOLUTION))
    between = between[np.argsort(-width[between])][:POINTS]
    return (places[between] + places[between + 1]) / 2


def _distance(places: np.ndarray, tokens: np.ndarray, q: np.ndarray) -> float:
    """The total variation of the swept tokens from q, less what the bisection left open."""
    edges = np.concatenate([[0.0], (places[1:] + places[:-1]) / 2, [1.0]])
    share = np.bincount(tokens, np.diff(edges), minlength=len(q))
    open_gaps = np.where(tokens[1:] != tokens[:-1], np.diff(places), 0.0)
    return max(0.0, 0.5 * float(np.abs(share - q).sum()) - float(open_gaps[open_gaps > RESOLUTION].sum()) / 2)


def _text(drawing: Drawing, vocab_size: int, batch: int, longest: int) -> Text:
    """Texts of 2 to 384 tokens, of a few different ones, so that lookups match and rare tokens are drafted."""
    rng = drawing.rng
    some = [
        drawing.whole(2, LONGEST_TEXT, lambda: int(np.exp(rng.uniform(np.log(2), np.log(384))))) for _ in range(batch)
    ]
    length = np.array(some, np.int32)
    prompt = rng.integers(1, length + 1).astype(np.int32)
    few = np.stack([np.resize(drawing.tokens(vocab_size, 6), 6) for _ in range(batch)])
    tokens = np.take_along_axis(few, rng.integers(0, 6, (batch, SLOTS)), axis=1)
    tokens = np.where(np.arange(SLOTS)[None, :] < length[:, None], tokens, 0).astype(np.int32)
    warp = drawing.warps(batch, vocab_size=min(vocab_size, 17))
    return Text(tokens, prompt, _context(drawing, length, prompt, longest, warp))


def _context(drawing: Drawing, length: np.ndarray, prompt: np.ndarray, longest: int, warp: Any) -> RoundContext:
    rng, batch = drawing.rng, len(length)
    budget = np.where(rng.uniform(size=batch) < 0.7, longest, rng.integers(0, longest + 1, batch)).astype(np.int32)
    seed, monitor = rng.integers(0, 2**32, batch).astype(np.uint32), jax.tree.map(np.asarray, PHASES.init(batch))
    monitor = monitor._replace(phase=rng.integers(0, 2, batch).astype(np.int32))
    emitted, alive = host((length - prompt).astype(np.int32)), host(np.ones(batch, bool))
    return RoundContext(host(length), emitted, host(budget), alive, host(seed), warp, monitor)


def _beside_others(
    functions: _Functions, params: Params, drawing: Drawing, text: Text, numbers: np.ndarray, vocab_size: int
) -> str:
    """What is wrong with rows beside others: in the same place to the bit, and in another place up to rounding."""
    batch, longest = numbers.shape
    state = functions.fill(params, text.tokens, text.context.length)
    first = _rows_of(functions.draft(params, state, text.tokens, text.context, numbers)[0])
    same, order = drawing.rng.uniform(size=batch) < 0.5, drawing.rng.permutation(batch)
    other = _text(drawing, vocab_size, batch, longest)
    numbers_of_others = drawing.rng.uniform(size=numbers.shape).astype(np.float32)

    def mixed(mine: Any, theirs: Any) -> Any:
        return jax.tree.map(lambda a, b: np.where(same.reshape(-1, *(1,) * (a.ndim - 1)), a, b), mine, theirs)

    for index, exact in ((np.arange(batch), True), (order, False)):
        here, uniforms = take_rows(mixed((text, numbers), (other, numbers_of_others)), index)
        state = functions.fill(params, here.tokens, here.context.length)
        again = _rows_of(functions.draft(params, state, here.tokens, here.context, uniforms)[0])
        rows = np.flatnonzero(same[index])
        for mine, others in zip(take_rows(first, index[rows]), take_rows(again, rows), strict=True):
            equal = np.array_equal(mine, others) if exact else np.allclose(mine, others, rtol=1e-4, atol=1e-6)
            if not equal:
                return "a row's drafts depend on the other rows of its batch"
    return ""


def _rows_of(draft: Draft) -> tuple[np.ndarray, ...]:
    """What a draft says, [B, ...]: entries beyond its length are zero, and distributions are probabilities."""
    tokens, one_hot, length = (np.asarray(leaf) for leaf in (draft.tokens, draft.one_hot, draft.length))
    inside = np.arange(tokens.shape[1])[None, :] < length[:, None]
    q = np.zeros((*tokens.shape, 1)) if draft.log_q is None else np.exp(np.asarray(draft.log_q))
    return np.where(inside, tokens, 0), inside & one_hot, length, np.where((inside & ~one_hot)[..., None], q, 0.0)
