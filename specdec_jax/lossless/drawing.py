"""What a proof draws from its seed: shapes, requests, warps, texts; and numbers that the tested functions contain.

A mistake that is limited to one number, such as an end token or a temperature, is seldom met by chance. The functions
under test are traced, and the constants of their programs are drawn too, with their neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.function_checks import Sizes, array, context_shapes, distribution_shapes, draft_shapes
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.lossless.enumeration import CHOSEN, DRAWN, EVEN, ODD, Requests
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, VerificationResult, Verifier, Warp

VOCABULARIES = (3, 4, 5, 6, 8, 12, 17)
BATCHES = (1, 2, 3, 4, 6, 8, 11, 16)
CONSTANT = 0.3  # probability that a number is one of the tested functions' constants, where one is in its range
SIZES = Sizes(2, 7, 3)  # at which functions are traced for their constants
LARGEST = 1024  # longest array whose entries count as constants


class Shape(NamedTuple):
    """The static sizes of some rounds; each is compiled."""

    vocab_size: int
    longest: int  # K
    batch: int
    reads: bool  # whether drafters read their targets
    chosen: bool  # whether all drafts of all rows are chosen, so that a verifier gets no distributions


class Drawing:
    """Random numbers of one proof, and the constants of the tested functions."""

    def __init__(self, seed: int, constants: Sequence[float] = ()) -> None:
        self.rng, self.constants = np.random.default_rng(seed), np.array(sorted({*constants}), np.float64)

    def shapes(self, longest: int) -> Iterator[Shape]:
        """Endless shapes: of five, one has drafts of up to `longest` tokens, one none, one drafts that are chosen."""
        while True:
            lengths = [0, 1, 2, int(self.rng.integers(3, 8)), longest]
            lengths = [min(length, longest) for length in lengths]
            vocabularies, batches = (self.rng.permutation(sizes) for sizes in (VOCABULARIES, BATCHES))
            chosen = int(self.rng.integers(1, len(lengths) - 1))
            for index in (4, 0, 3, 1, 2):
                vocab, length = int(vocabularies[index]), lengths[index]
                reads = length > 0 and vocab <= 6 and self.rng.uniform() < 0.5
                yield Shape(vocab, length, int(batches[index]), reads, index == chosen)

    def among(self, low: float, high: float) -> np.ndarray:
        """The constants in [low, high]."""
        return self.constants[(self.constants >= low) & (self.constants <= high)]

    def number(self, low: float, high: float, otherwise: Callable[[], float]) -> float:
        """A constant in [low, high], or a number just below or above one, or `otherwise()`."""
        some = self.among(low, high)
        if len(some) and self.rng.uniform() < CONSTANT:
            near = self.rng.choice(some) * self.rng.choice([1.0, 1.0, 0.97, 1.03])
            return float(np.clip(near, low, high))
        return float(otherwise())

    def whole(self, low: int, high: int, otherwise: Callable[[], int]) -> int:
        """A whole number in [low, high]: a constant, one beside it, or `otherwise()`."""
        some = self.among(low, high)
        if len(some) and self.rng.uniform() < CONSTANT:
            return int(np.clip(int(self.rng.choice(some)) + self.rng.integers(-1, 2), low, high))
        return int(otherwise())

    def tokens(self, vocab_size: int, count: int) -> np.ndarray:
        """Distinct tokens [count] int32: constants and their neighbours, tokens near either end, and any."""
        rng, some = self.rng, np.unique(np.round(self.among(0, vocab_size - 1)).astype(np.int64))
        near = np.unique(np.clip(np.concatenate([some, some + 1, some - 1]), 0, vocab_size - 1))
        ends = np.exp(rng.uniform(0, np.log(vocab_size), count)).astype(np.int64) - 1
        ends = np.where(rng.uniform(size=count) < 0.5, ends, vocab_size - 1 - ends)
        large = some[some >= 16]  # smaller ones are counts, and in every toy's vocabulary
        first = rng.permutation(large)[: count // 2], rng.permutation(near)[: count // 3]
        every = np.concatenate([*first, rng.integers(0, vocab_size, count), ends])
        _, index = np.unique(every, return_index=True)
        return every[np.sort(index)][:count].astype(np.int32)

    def warps(self, count: int, greedy_only: bool = False, vocab_size: int = 17) -> Warp:
        """Warps of `count` requests: temperature 0, near 0, between, 1, and above, with none to three truncations."""
        rng, rows = self.rng, []
        for _ in range(count):
            kind = rng.choice(5, p=[0.2, 0.2, 0.3, 0.1, 0.2])
            temperature = self.number(
                1e-3,
                8.0,
                lambda kind=kind: (0.0, rng.uniform(0.02, 0.3), rng.uniform(0.3, 1.0), 1.0, rng.uniform(1.0, 3.0))[
                    kind
                ],
            )
            on = rng.uniform(size=3) < [0.45, 0.4, 0.35]
            top_k = self.whole(1, vocab_size, lambda: int(rng.integers(1, vocab_size + 1))) if on[0] else 0
            top_p = self.number(0.01, 1.0, lambda: rng.uniform(0.05, 1.0)) if on[1] else 1.0
            min_p = self.number(0.0, 0.95, lambda: rng.uniform(0.0, 0.9) ** 2) if on[2] else 0.0
            rows.append((0.0 if greedy_only else temperature, top_k, top_p, min_p))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return jax.tree.map(np.asarray, make_warp(count, *columns))

    def requests(self, count: int, shape: Shape, greedy_only: bool, rounds: int) -> Requests:
        """`count` requests: warps, drafts drawn or chosen, budgets that end a text within its rounds, long texts."""
        rng, available = self.rng, rounds * (shape.longest + 1)
        kind = rng.choice([DRAWN, CHOSEN, EVEN, ODD], count, p=[0.6, 0.2, 0.1, 0.1])
        limit = np.where(
            rng.uniform(size=count) < 0.6, available + shape.longest + 1, rng.integers(1, available + 2, count)
        )
        lengths = [
            self.whole(0, 100_000, lambda: 0 if rng.uniform() < 0.5 else int(np.exp(rng.uniform(0, 11))))
            for _ in range(2 * count)
        ]
        before, prompt = lengths[:count], np.maximum(lengths[count:], 2)
        numbers = np.where(shape.chosen, CHOSEN, kind), limit, before, rng.integers(0, 2**32, count), prompt
        dtypes = np.int8, np.int32, np.int32, np.uint32, np.int32
        warp = self.warps(count, greedy_only, shape.vocab_size)
        return Requests(
            warp, *(np.asarray(column).astype(dtype) for column, dtype in zip(numbers, dtypes, strict=True))
        )


def constants_of(
    policy: StoppingPolicy | None, verifier: Verifier | None, monitor: Monitor, drafter: Drafter | None = None
) -> list[float]:
    """The numbers that occur in the programs and initial states of these strategies' functions."""
    batch, whole = SIZES.batch, array(jnp.int32, SIZES.batch)
    watched = monitor.init(batch)
    context = context_shapes(batch, watched)._replace(relative_drafter_cost=array(jnp.float32, batch))
    row, constants = distribution_shapes(batch, SIZES.vocab_size), set()
    drafts = draft_shapes(SIZES, True)
    if policy is not None:
        chain = policy.as_chain()
        state, emitted = chain.init(batch), array(jnp.int32, batch, SIZES.max_draft_length + 1)
        constants |= _of_leaves(state)
        constants |= _traced(chain.begin, state, context) | _traced(chain.check, state, row, whole, context)
        constants |= _traced(chain.proceed, state, row, whole, whole, context)
        constants |= _traced(chain.update, state, drafts, VerificationResult(emitted, whole))
    if verifier is not None:
        state = verifier.init(batch)
        target = distribution_shapes(batch, SIZES.vocab_size, SIZES.max_draft_length + 1)

        def verified(state: Any, draft: Any, target: Any, context: Any, accepted: Any) -> Any:
            log_prob, following, state = verifier.verify(state, draft, target, context)
            return log_prob, following(accepted), state

        constants |= _of_leaves(state) | _traced(verified, state, drafts, target, context, whole)
    if drafter is not None:
        tokens, longest = array(jnp.int32, batch, 16), drafter.max_draft_length
        begun = partial(drafter.init, None, batch, 16)

        def predicted(tokens: Any, context: Any, uniform: Any, drafted: Any) -> Any:
            source = drafter.source(None, begun(), tokens, context)
            following, memory = source.predict(source.open(drafted == 0), drafted, uniform)
            return following, source.keep(memory, following.token, drafted == 0, drafted)

        def closed(tokens: Any, context: Any, numbers: Any, log_q: Any) -> Any:
            source = drafter.source(None, begun(), tokens, context)
            return source.close(draft_loop.draft(source, always, (), context, lambda index: numbers, longest, log_q))

        def committed(tokens: Any, length: Any) -> Any:
            return drafter.commit(None, drafter.fill(None, begun(), tokens, length), tokens, length)

        numbers, always = array(jnp.float32, batch), StoppingPolicy(lambda batch: (), hyperparameters={})
        log_q = array(jnp.float32, batch, longest, SIZES.vocab_size)
        constants |= _traced(predicted, tokens, context, numbers, whole) | _traced(committed, tokens, whole)
        constants |= _traced(closed, tokens, context, numbers, log_q)
    return sorted(constants)


def _traced(function: Callable[..., Any], *shapes: Any) -> set[float]:
    """The constants of a function's program, and of all programs inside it."""
    closed = jax.make_jaxpr(function)(*shapes)
    constants, todo = _of_leaves(closed.consts), [closed.jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            constants |= _of_leaves([getattr(variable, "val", ()) for variable in equation.invars])
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    constants |= _of_leaves(getattr(value, "consts", []))
                    todo.append(inner)
    return constants


def _of_leaves(tree: Any) -> set[float]:
    """The finite numbers in all arrays of up to LARGEST entries."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    numbers = [leaf.astype(np.float64).ravel() for leaf in leaves if leaf.size <= LARGEST and leaf.dtype.kind in "iuf"]
    return {float(value) for values in numbers for value in values if np.isfinite(value)}
