"""Replay: any stopping rule over a trace, without a model, many settings at once.

What is exact: with token rejection (and under greedy decoding) a replay's rounds have the law of a live run's, whatever
the rule, because a rule sees only the drafter's laws and its own verdicts; under greedy decoding they are the live
rounds themselves, up to ties in the numerics of the two programs. What is not: block and lossy verifiers accept other
tokens; a rule that reads more of a law than its statistics and the probability of the drafted token cannot be replayed
(it would see a law of one token); drafts longer than the trace's tails cannot be followed; a clock is the cost model's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.analysis.cost_model import CostModel
from specdec_jax.analysis.trace import FEATURES, Trace
from specdec_jax.numbers import select_rows
from specdec_jax.types import Array, Draft, Law, PolicyState, RoundContext, StoppingPolicy, Verdict, Warp

BLOCK = 32_768  # rows (settings times texts) of one program


class Replay(NamedTuple):
    """Counts per setting and text, [S, N] int64 unless said otherwise. Names as in `Statistics`."""

    rounds: np.ndarray
    emitted: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray  # after the end-of-sequence cut
    passes: np.ndarray  # drafter passes
    checked: np.ndarray  # of these, only looked at
    by_length: np.ndarray  # [S, N, K+1], rounds by drafted tokens
    record: np.ndarray | None  # [S, N, rounds, 4] int16: drafted, accepted, emitted, passes; -1 beyond the last round

    @property
    def wasted(self) -> np.ndarray:
        """Drafter passes that gave no accepted token."""
        return self.passes - self.accepted

    @property
    def tokens_per_round(self) -> np.ndarray:
        """[S] float64, tokens a target pass, total over total."""
        return self.emitted.sum(axis=1) / self.rounds.sum(axis=1)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """[S] float64, accepted over drafted, total over total."""
        return self.accepted.sum(axis=1) / np.maximum(self.drafted.sum(axis=1), 1)

    def seconds(self, costs: CostModel) -> np.ndarray:
        """[S, N] float64, decoding time of each text."""
        verifying = self.by_length @ costs.pass_times(self.by_length.shape[-1] - 1)
        return verifying + self.passes * costs.drafter_step

    def speedup(self, costs: CostModel) -> np.ndarray:
        """[S, N] float64, against plain decoding of the same text."""
        return self.emitted * costs.plain_pass / self.seconds(costs)

    def total_speedup(self, costs: CostModel) -> np.ndarray:
        """[S] float64, total over total."""
        return self.emitted.sum(axis=1) * costs.plain_pass / self.seconds(costs).sum(axis=1)


class _Rows(NamedTuple):
    """Where every row stands, in the middle of a draft or between rounds. Leaves are [R] int32 or bool."""

    at: Array  # tokens emitted when the round began
    drafted: Array
    accepted: Array
    passes: Array  # of this round
    fresh: Array  # a round begins
    diverged: Array  # a token of this draft will be rejected
    done: Array
    policy: PolicyState


class _Counts(NamedTuple):
    rounds: Array  # [R] int32
    drafted: Array
    accepted: Array
    passes: Array
    checked: Array
    by_length: Array  # [R, K+1]
    record: Array | None  # [R, rounds, 4] int16


class _Texts(NamedTuple):
    """The trace on the device; `text` says which one a row replays."""

    path: Array
    accepted: Array
    tail_of: Array
    tails: Array
    length: Array
    limit: Array
    prompt_length: Array
    seed: Array
    temperature: Array
    text: Array  # [R] int32


def replay(
    trace: Trace,
    policy: StoppingPolicy,
    numbers: Mapping[str, Any] | None = None,
    *,
    max_draft_length: int | None = None,
    record: bool = False,
) -> Replay:
    """Runs `policy` over every text of a trace, once a setting.

    Args:
        numbers: of `policy.init`; arrays [S] are S settings, scalars are the same for all, and a number that is itself
            a vector of n has shape [S, n] or [1, n].
        max_draft_length: K, most drafts a round; the trace's longest unless given.
        record: keep every round.

    Raises:
        ValueError: a K the trace cannot follow, arrays of different lengths, or numbers `init` refuses.
    """
    most = trace.max_draft_length if max_draft_length is None else max_draft_length
    if not 1 <= most <= trace.max_draft_length:
        raise ValueError(f"max_draft_length must be 1 to the trace's {trace.max_draft_length}, got {max_draft_length}")
    given, settings = _settings(numbers or {})
    texts = trace.num_texts
    step = max(1, BLOCK // texts)
    pieces = []
    for first in range(0, settings, step):
        chosen = {name: value[first : first + step] for name, value in given.items()}
        pieces.append(_replay_block(trace, policy, chosen, min(step, settings - first), most, record))
    whole: list[Any] = [
        np.concatenate(leaves) if leaves[0] is not None else None for leaves in zip(*pieces, strict=True)
    ]
    rounds, drafted, accepted, passes, checked, by_length, rows = whole
    emitted = np.broadcast_to(trace.length[None, :], (settings, texts)).astype(np.int64)
    return Replay(rounds, emitted, drafted, accepted, passes, checked, by_length, rows)


def oracle(trace: Trace, max_draft_length: int | None = None) -> Replay:
    """The limit of every stopping rule: it never drafts a token that will be rejected. One setting."""
    most = trace.max_draft_length if max_draft_length is None else max_draft_length
    texts = trace.num_texts
    counts = np.zeros((5, 1, texts), np.int64)  # rounds, drafted, accepted, passes, checked
    by_length = np.zeros((1, texts, most + 1), np.int64)
    for text in range(texts):
        at, end = 0, int(trace.length[text])
        while at < end:
            budget = min(most, end - at - 1)  # the last token is the target's own
            bits = trace.accepted[text, at : at + budget]
            run = int(np.argmin(np.append(bits, False)))
            counts[:, 0, text] += (1, run, min(run, end - at), run, 0)
            by_length[0, text, run] += 1
            at += run + 1
    emitted = trace.length[None, :].astype(np.int64)
    rounds, drafted, accepted, passes, checked = counts
    return Replay(rounds, emitted, drafted, accepted, passes, checked, by_length, None)


def _settings(numbers: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], int]:
    """Every number as [S, ...], and S."""
    arrays = {name: np.atleast_1d(np.asarray(value)) for name, value in numbers.items() if value is not None}
    sizes = {len(value) for value in arrays.values()} - {1}
    if len(sizes) > 1:
        raise ValueError(f"settings must be one number or as many of each, got {sorted(sizes)}")
    settings = sizes.pop() if sizes else 1
    return {name: np.broadcast_to(value, (settings, *value.shape[1:])) for name, value in arrays.items()}, settings


def _replay_block(
    trace: Trace, policy: StoppingPolicy, numbers: Mapping[str, np.ndarray], settings: int, most: int, record: bool
) -> tuple[np.ndarray | None, ...]:
    """The counts of `settings` settings, each [settings, N, ...]."""
    texts = trace.num_texts
    rows = settings * texts
    begun = policy.init(rows, **{name: np.repeat(value, texts, axis=0) for name, value in numbers.items()})
    text = np.tile(np.arange(texts, dtype=np.int32), settings)
    fields = {name: jnp.asarray(getattr(trace, name)) for name in _Texts._fields if name != "text"}
    known = _Texts(**fields, text=jnp.asarray(text))
    rounds = int(trace.length.max()) if record else 0
    counts = _program(policy, most, rounds)(known, jax.tree.map(jnp.asarray, begun))
    shaped = []
    for leaf in counts:
        values = None if leaf is None else np.asarray(leaf)
        if values is not None and values.dtype == np.int32:
            values = values.astype(np.int64)
        shaped.append(None if values is None else values.reshape(settings, texts, *values.shape[1:]))
    return tuple(shaped)


@functools.lru_cache(maxsize=64)
def _program(policy: StoppingPolicy, most: int, rounds: int) -> Callable[[_Texts, PolicyState], _Counts]:
    """One compiled replay of a policy's structure; its numbers are arguments."""

    def run(texts: _Texts, begun: PolicyState) -> _Counts:
        size = texts.text.shape[0]
        zero, no = jnp.zeros((size,), jnp.int32), jnp.zeros((size,), bool)
        rows = _Rows(zero, zero, zero, zero, ~no, no, no, begun)
        record = jnp.full((size, rounds, 4), -1, jnp.int16) if rounds else None
        counts = _Counts(zero, zero, zero, zero, zero, jnp.zeros((size, most + 1), jnp.int32), record)
        step = functools.partial(_step, policy, texts, most)
        return lax.while_loop(lambda carry: jnp.any(~carry[0].done), lambda carry: step(*carry), (rows, counts))[1]

    return jax.jit(run)


def _step(policy: StoppingPolicy, texts: _Texts, most: int, rows: _Rows, counts: _Counts) -> tuple[_Rows, _Counts]:
    """One drafter pass of every row, with the round's beginning before it and its end after it where they are due.

    Rows do not wait for each other at the ends of rounds: a row with short drafts would wait for the longest.
    """
    context = _context(texts, rows, most)
    begins, begun = policy.begin(rows.policy, context)
    state = select_rows(rows.fresh & ~rows.done, begun, rows.policy)
    going = ~rows.done & (~rows.fresh | (begins & (context.budget > 0)))
    law, hit = _law(texts, rows)
    token = jnp.zeros_like(rows.at)
    wants, after = policy.check(state, law, rows.drafted, context)
    state = select_rows(going, after, state)
    drawn = going & wants
    drafted = rows.drafted + drawn.astype(jnp.int32)
    goes_on, after = policy.proceed(state, law, token, drafted, context)
    state = select_rows(drawn, after, state)
    rows = rows._replace(
        drafted=drafted,
        accepted=rows.accepted + (drawn & hit).astype(jnp.int32),
        passes=rows.passes + going.astype(jnp.int32),
        fresh=jnp.zeros_like(going),
        diverged=rows.diverged | (drawn & ~hit),
        policy=state,
    )
    ends = ~rows.done & ~(drawn & goes_on & (drafted < context.budget))
    return _end(policy, texts, most, rows, counts, ends)


def _context(texts: _Texts, rows: _Rows, most: int) -> RoundContext:
    room = jnp.minimum(texts.limit[texts.text] - rows.at - 1, most)
    size = rows.at.shape[0]
    one = jnp.ones((size,), jnp.float32)
    return RoundContext(
        length=texts.prompt_length[texts.text] + rows.at,
        emitted=rows.at,
        budget=jnp.where(rows.done, 0, jnp.maximum(room, 0)),
        alive=~rows.done,
        seed=texts.seed[texts.text],
        warp=Warp(texts.temperature[texts.text], jnp.zeros((size,), jnp.int32), one, jnp.zeros_like(one)),
        monitor=(),
    )


def _law(texts: _Texts, rows: _Rows) -> tuple[Law, Array]:
    """The law of the next position as a law of one token, and whether that token would be accepted."""
    at = rows.at + rows.accepted
    at = jnp.minimum(at, texts.path.shape[1] - 1)
    hit = texts.accepted[texts.text, at] & ~rows.diverged
    tail = texts.tails[
        texts.tail_of[texts.text, at], jnp.minimum(rows.drafted - rows.accepted, texts.tails.shape[1] - 1)
    ]
    seen = jnp.where(hit[:, None], texts.path[texts.text, at], tail)
    fields = {name: seen[:, index] for index, name in enumerate(FEATURES)}
    log_q = fields.pop("log_q")
    return Law(log_prob=log_q[:, None], top_token=jnp.zeros_like(rows.at), **fields), hit


def _end(
    policy: StoppingPolicy, texts: _Texts, most: int, rows: _Rows, counts: _Counts, ends: Array
) -> tuple[_Rows, _Counts]:
    """The rounds that end here: what the policy learns, what is emitted and counted."""
    size = rows.at.shape[0]
    draft = Draft(jnp.zeros((size, most), jnp.int32), None, jnp.zeros((size, most), bool), rows.drafted)
    verdict = Verdict(jnp.zeros((size, most + 1), jnp.int32), rows.accepted + 1)
    state = select_rows(ends, policy.update(rows.policy, draft, verdict), rows.policy)
    length = texts.length[texts.text]
    emitted = jnp.minimum(rows.accepted + 1, length - rows.at)
    accepted = jnp.minimum(rows.accepted, emitted)
    added = (1, rows.drafted, accepted, rows.passes, rows.passes - rows.drafted)
    sums = [total + jnp.where(ends, new, 0) for total, new in zip(counts[:5], added, strict=True)]
    lengths = jnp.arange(most + 1, dtype=jnp.int32)[None, :] == rows.drafted[:, None]
    record = counts.record
    if record is not None:
        index = jnp.where(ends, counts.rounds, record.shape[1])
        line = jnp.stack([rows.drafted, accepted, emitted, rows.passes], axis=1).astype(jnp.int16)
        record = record.at[jnp.arange(size), index].set(line, mode="drop")
    by_length = counts.by_length + (lengths & ends[:, None]).astype(jnp.int32)
    counts = _Counts(sums[0], sums[1], sums[2], sums[3], sums[4], by_length, record)
    zero = lambda value: jnp.where(ends, 0, value)  # noqa: E731
    at = jnp.where(ends, rows.at + emitted, rows.at)
    return _Rows(
        at=at,
        drafted=zero(rows.drafted),
        accepted=zero(rows.accepted),
        passes=zero(rows.passes),
        fresh=ends,
        diverged=rows.diverged & ~ends,
        done=rows.done | (at >= length),
        policy=state,
    ), counts
