"""The loop of a replay: every row is a text with a setting, every step one drafter pass of all rows."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.sampling import policy_seeds
from specdec_jax.hyperparameters import select_rows
from specdec_jax.monitors.phases import Phases
from specdec_jax.replay.trace import FEATURES, TRUNCATIONS, Trace
from specdec_jax.types import (
    Array,
    Distribution,
    Draft,
    PolicyState,
    RoundContext,
    StoppingPolicy,
    VerificationResult,
    Warp,
)


@jax.tree_util.register_static
class Unrecorded:
    """A placeholder that raises an error when anything but its shape is read.

    Raises:
        ValueError: "this rule reads ..., which a trace does not hold", from every operation, indexing or jnp function.
    """

    def __init__(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        self._name, self._shape = name, shape

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise ValueError(f"this rule reads {self._name}, which a trace does not hold: it cannot be replayed")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in a live run, if it is known."""
        return self._refuse() if self._shape is None else self._shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # attributes that Python and jax look up in any object
            raise AttributeError(name)
        self._refuse()

    def __hash__(self) -> int:
        return hash((self._name, self._shape))

    def __eq__(self, other: object) -> bool:  # jax compares static parts of its arguments
        return vars(self) == vars(other) if isinstance(other, Unrecorded) else self._refuse()

    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = __bool__ = __index__ = __float__ = _refuse
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = __pos__ = __abs__ = _refuse


unrecorded: Callable[..., Array] = cast(Any, Unrecorded)  # typed as an array


class Rows(NamedTuple):
    """The position of every row, within a draft or between rounds. Leaves are [R] int32 or bool."""

    at: Array  # tokens emitted when the round began
    drafted: Array
    accepted: Array
    passes: Array  # drafter passes of this round
    fresh: Array  # whether a round begins
    done: Array
    policy: PolicyState


class Counts(NamedTuple):
    rounds: Array  # [R] int32
    drafted: Array
    accepted: Array
    passes: Array
    discarded: Array
    by_length: Array  # [R, P+1], by tokens verified after the first
    record: Array | None  # [R, rounds, 4] int16


class Texts(NamedTuple):
    """The trace on the device; `text` is the index of each row's text."""

    path: Array | None  # None with `tails`: a log of accepted lengths
    accepted: Array
    tail_of: Array
    tails: Array | None
    length: Array
    limit: Array
    prompt_length: Array
    key: Array  # [N, 2] uint32
    temperature: Array
    truncation: Array | None
    chains: Array | None
    run: Array | None
    candidate: Array | None
    phase: Array  # [N, T+1] int32
    text: Array  # [R] int32


def texts_of(trace: Trace, text: Any, phase: np.ndarray | None = None) -> Texts:
    """A trace on the device, with the index `text` [R] of each row's text; by default there is a single phase."""
    arrays = {name: getattr(trace, name) for name in Texts._fields if name not in ("phase", "text", "key")}
    if trace.lengths_only:
        arrays |= {"path": None, "tails": None}
    hashes = np.zeros_like(trace.seed) if trace.prompt_hash is None else trace.prompt_hash
    arrays["key"] = np.stack([hashes, trace.seed], axis=1).astype(np.uint32)
    fields: dict[str, Any] = {name: None if value is None else jnp.asarray(value) for name, value in arrays.items()}
    phases = np.zeros(trace.accepted.shape, np.int32) if phase is None else phase
    return Texts(**fields, phase=jnp.asarray(phases), text=jnp.asarray(text, jnp.int32))


def first_rows(texts: Texts, begun: PolicyState, places: int, rounds: int) -> tuple[Rows, Counts]:
    """The rows before their first round, with drafts of up to `places` tokens; `rounds` above 0 keeps a record."""
    size = texts.text.shape[0]
    zero, no = jnp.zeros((size,), jnp.int32), jnp.zeros((size,), bool)
    record = jnp.full((size, rounds, 4), -1, jnp.int16) if rounds else None
    counts = Counts(zero, zero, zero, zero, zero, jnp.zeros((size, places + 1), jnp.int32), record)
    return Rows(zero, zero, zero, zero, ~no, no, begun), counts


def replay_pass(policy: StoppingPolicy, texts: Texts, longest: int, rows: Rows, counts: Counts) -> tuple[Rows, Counts]:
    """One drafter pass of every row, including the beginning and the end of its round where due.

    Rows do not wait for each other at the end of rounds, so that short drafts do not wait for long ones.
    """
    context = _context(texts, rows, longest)
    begins, state = draft_loop.start_rows(policy, rows.policy, context, rows.fresh & ~rows.done)
    going = begins | ~(rows.done | rows.fresh)
    distribution, hit = _distribution(texts, rows)
    step = draft_loop.step(
        policy, state, context, going, rows.drafted, distribution, unrecorded("which token was drawn")
    )
    rows = rows._replace(
        drafted=step.num_drafted,
        accepted=rows.accepted + (step.is_drafted & hit).astype(jnp.int32),
        passes=rows.passes + going.astype(jnp.int32),
        fresh=jnp.zeros_like(going),
        policy=step.policy,
    )
    ends = ~rows.done & ~step.going  # of a round: the policy is updated, tokens are emitted and counted
    size = rows.at.shape[0]
    draft = Draft(
        tokens=unrecorded("the drafted tokens", (size, longest)),
        log_q=unrecorded("the distributions that drafts were drawn from (log_q)"),
        one_hot=jnp.zeros((size, longest), bool),
        length=rows.drafted,
    )
    result = VerificationResult(unrecorded("the emitted tokens", (size, longest + 1)), rows.accepted + 1)
    verified, emitted, places = rows.drafted, result.length, counts.by_length.shape[1] - 1
    if policy.tree_hooks is not None:
        draft, result, verified, emitted = policy.tree_hooks.end_round(policy, texts, rows, context, draft, places)
    state = select_rows(ends, policy.update(rows.policy, draft, result), rows.policy)
    length = texts.length[texts.text]
    emitted = jnp.minimum(emitted, length - rows.at)
    accepted = jnp.minimum(rows.accepted, emitted)
    added = (1, rows.drafted, accepted, rows.passes, rows.passes - rows.drafted)
    sums = [total + jnp.where(ends, new, 0) for total, new in zip(counts[:5], added, strict=True)]
    lengths = jnp.arange(places + 1, dtype=jnp.int32)[None, :] == verified[:, None]
    record = counts.record
    if record is not None:
        index = jnp.where(ends, counts.rounds, record.shape[1])
        line = jnp.stack([rows.drafted, accepted, emitted, rows.passes], axis=1).astype(jnp.int16)
        record = record.at[jnp.arange(size), index].set(line, mode="drop")
    by_length = counts.by_length + (lengths & ends[:, None]).astype(jnp.int32)
    counts = Counts(*sums, by_length=by_length, record=record)
    zero = lambda value: jnp.where(ends, 0, value)  # noqa: E731
    at = jnp.where(ends, rows.at + emitted, rows.at)
    return Rows(
        at=at,
        drafted=zero(rows.drafted),
        accepted=zero(rows.accepted),
        passes=zero(rows.passes),
        fresh=ends,
        done=rows.done | (at >= length),
        policy=state,
    ), counts


def _context(texts: Texts, rows: Rows, longest: int) -> RoundContext:
    temperature = texts.temperature[texts.text]
    if texts.truncation is None:
        warp = Warp(temperature, *(unrecorded(f"the warp's {name}") for name in TRUNCATIONS))
    else:
        top_k, top_p, min_p = jnp.unstack(texts.truncation[texts.text], axis=1)
        warp = Warp(temperature, top_k.astype(jnp.int32), top_p, min_p)
    budget = jnp.minimum(texts.limit[texts.text] - rows.at - 1, longest)
    phase = texts.phase[texts.text, jnp.minimum(rows.at, texts.phase.shape[1] - 1)]
    unknown = {name: unrecorded(f"the monitor's {name}") for name in Phases._fields if name != "phase"}
    return RoundContext(
        length=texts.prompt_length[texts.text] + rows.at,
        emitted=rows.at,
        budget=jnp.where(rows.done, 0, jnp.maximum(budget, 0)),
        alive=~rows.done,
        policy_seed=policy_seeds(texts.key[texts.text]),
        warp=warp,
        monitor=Phases(phase=phase, **unknown),
    )


def _distribution(texts: Texts, rows: Rows) -> tuple[Distribution, Array]:
    """The recorded distribution of the next position, with its token, and whether that token would be accepted."""
    seen = None
    if texts.run is None:
        assert texts.path is not None and texts.tails is not None
        at = jnp.minimum(rows.at + rows.accepted, texts.path.shape[1] - 1)
        hit = texts.accepted[texts.text, at]  # stays False after a rejected draft, because `at` does not advance
        after = jnp.minimum(rows.drafted - rows.accepted, texts.tails.shape[1] - 1)
        tail = texts.tails[texts.tail_of[texts.text, at], after]
        seen = jnp.where(hit[:, None], texts.path[texts.text, at], tail)
    else:  # of a drafter that reads its target, by the chain that began with the round, or of accepted lengths only
        at = jnp.minimum(rows.at, texts.run.shape[1] - 1)
        ends = jnp.minimum(texts.run[texts.text, at], texts.length[texts.text] - rows.at)  # it may have been truncated
        hit = rows.drafted < ends
        if texts.chains is not None:
            seen = texts.chains[texts.text, at, jnp.minimum(rows.drafted, texts.chains.shape[2] - 1)]
    if seen is None:
        fields = {name: unrecorded(f"the drafter's distributions ({name})") for name in FEATURES}
    else:
        fields = {name: seen[:, index] for index, name in enumerate(FEATURES)}
    log_q = fields.pop("log_q")
    distribution = Distribution(
        log_prob=unrecorded("the probabilities of all tokens (log_prob; sampling.log_prob_of has the drawn one's)"),
        top_token=unrecorded("which token is the most probable (top_token)"),
        raw_log_prob=unrecorded("the raw probabilities of all tokens (raw_log_prob)"),
        token_log_prob=log_q,
        **fields,
    )
    return distribution, hit
