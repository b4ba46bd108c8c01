"""Checks the return values of the functions of policies, verifiers, drafters and monitors before compilation.

Only shapes are computed, by `jax.eval_shape`. Inside a loop a wrong shape would be broadcast over the rows, or fail in
jax with a message about carries. Every error is one line, with the file and line of a user's function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.rounds import ModelParams, Parts, draft_of, empty_log_q
from specdec_jax.decoding.sampling import distribution
from specdec_jax.decoding.user_code import Refused, definition, described, first_definition, is_users
from specdec_jax.strategy import Strategy
from specdec_jax.types import (
    DecodeState,
    Distribution,
    Draft,
    Drafted,
    Drafter,
    Monitor,
    MonitorState,
    Next,
    PolicyState,
    RoundContext,
    Seen,
    Source,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    VerifierState,
    Warp,
)
from specdec_jax.types.defaults import no_threshold


class Sizes(NamedTuple):
    """The sizes that determine shapes."""

    batch: int
    vocab_size: int
    max_draft_length: int


def check_parts(parts: Parts, params: ModelParams, state: DecodeState, source: Any = None) -> None:
    """Checks the policy, and a user's drafter, verifier and monitor, at the shapes of `state`, before its prefill.

    Raises:
        ValueError: a function fails or returns wrong shapes. One line: the file and line of a user's function, its
            name, and its actual and required return value, or the error that it raises.
    """
    policy, drafter, verifier = parts.policy, parts.drafter, parts.verifier
    batch, slots = state.tokens.shape
    longest = drafter.max_draft_length
    sizes = Sizes(batch, parts.target.spec.vocab_size, longest)
    check_policy(policy, state.policy, state.monitor, sizes, keep_log_q=verifier.needs_log_q)
    drafts = draft_shapes(sizes, longest, verifier.needs_log_q)
    drafter_state: Any = ()
    if is_users(drafter) or is_users(verifier):
        drafts, drafter_state = _check_drafts(parts, params, sizes, slots, state, source)
    if is_users(verifier):
        for held in sorted({min(width - 1, longest) for width in parts.widths}):
            first = lambda leaf, held=held: leaf if leaf.ndim == 1 else leaf[:, :held]  # noqa: E731
            narrow = jax.eval_shape(functools.partial(jax.tree.map, first), drafts)
            check_verifier(verifier, state.verifier, sizes, state.monitor, narrow)
            if policy.rounds is not None:
                policy.rounds.check_verifier(policy, verifier, state.verifier, sizes, state.monitor, held)
    if is_users(drafter):
        _check_observer(drafter, params, drafter_state, sizes, slots)
    if is_users(parts.monitor):
        check_monitor(parts.monitor, state.monitor, sizes, parts.widths)


def check_policy(
    policy: StoppingPolicy, state: PolicyState, monitor: MonitorState, sizes: Sizes, *, keep_log_q: bool = True
) -> None:
    """Checks that a policy's functions return one answer per row and keep the shapes of their state.

    Args:
        state, monitor: results of `policy.init(batch, ...)` and the monitor's `init(batch, ...)`; arrays, tracers or
            shapes, only shapes are read. A policy that reads phases needs the state of a monitor of phases.

    Raises:
        ValueError: names the function with its actual and required return value.
    """
    probe = Probe.of("policy", policy, state, sizes.batch)
    batch = sizes.batch
    whole, flags = array(jnp.int32, batch), array(jnp.bool_, batch)
    relative = array(jnp.float32, batch)  # one cost per row, as with several drafters
    context = context_shapes(batch, monitor)._replace(relative_drafter_cost=relative)
    seen = distribution_shapes(batch, sizes.vocab_size)
    for name, arguments in (
        ("begin", (context,)),
        ("check", (seen, whole, context)),
        ("proceed", (seen, whole, whole, context)),
    ):
        answer, after = probe.parts_of(name, probe.result(name, probe.state, *arguments), "(answer, state)", 2)
        wanted = f"{words(flags)}, one answer for each of {batch} rows" if batch > 1 else f"{words(flags)} for one row"
        if not isinstance(answer, jax.ShapeDtypeStruct) or (answer.shape, answer.dtype) != (flags.shape, flags.dtype):
            probe.refuse(name, f"must answer {wanted}; it answers {words(answer)}")
        probe.must_keep_state(name, after)
    learnt_from: tuple[Any, Any] = draft_shapes(sizes, sizes.max_draft_length, keep_log_q), _result(sizes)
    if policy.rounds is not None:
        learnt_from = policy.rounds.check_answers(probe, policy, sizes, context, keep_log_q)
    probe.must_keep_state("update", probe.result("update", probe.state, *learnt_from))
    shown = probe.result("threshold", probe.state)
    if dims(shown) != (batch,) and policy.threshold is not no_threshold:
        probe.refuse("threshold", f"must answer float32[{batch}]; it answers {words(shown)}")


def check_verifier(
    verifier: Verifier, state: VerifierState, sizes: Sizes, monitor: MonitorState = (), draft: Draft | None = None
) -> None:
    """Checks that a verifier's functions accept a draft of the given shapes and return what `Verify` requires.

    Args:
        state, monitor: as in `check_policy`.
        draft: shapes of the draft; None: a draft of `sizes.max_draft_length` tokens.

    Raises:
        ValueError: as `check_policy`.
    """
    batch, vocab = sizes.batch, sizes.vocab_size
    context = context_shapes(batch, monitor)
    draft = draft_shapes(sizes, sizes.max_draft_length, verifier.needs_log_q) if draft is None else draft
    probe = Probe.of("verifier", verifier, state, batch)
    target, accepted = distribution_shapes(batch, vocab, draft.tokens.shape[1] + 1), array(jnp.int32, batch)

    def played(state: Any, draft: Any, target: Any, accepted: Any, context: Any) -> Any:
        returned = verifier.verify(state, draft, target, context)
        wanted = "(log_prob_accepted, next_distribution, state)"
        log_prob, following, after = probe.parts_of("verify", returned, wanted, 3)
        if not callable(following):
            probe.refuse("verify", f"must return a function as next_distribution; it returns {words(following)}")
        with described(definition(following), "the verifier's next_distribution"):
            return log_prob, following(accepted), after

    log_prob, following, after = probe.result("verify", probe.state, draft, target, accepted, context, of=played)
    for name, answer, shape in (
        ("log_prob_accepted", log_prob, (batch, draft.tokens.shape[1] + 1)),
        ("next_distribution's answer", following, (batch, vocab)),
    ):
        if dims(answer) != shape or not jnp.issubdtype(answer.dtype, jnp.floating):
            wanted, drafts = words(array(jnp.float32, *shape)), draft.tokens.shape[1]
            probe.refuse("verify", f"must give {name} as {wanted} of {drafts} drafts; it is {words(answer)}")
    probe.must_keep_state("verify", after)


class Probe(NamedTuple):
    """A strategy whose functions are checked, and the shapes of its state."""

    kind: str
    strategy: Any
    state: Any
    batch: int

    @classmethod
    def of(cls, kind: str, strategy: Any, state: Any, batch: int) -> "Probe":
        """The probe of a strategy and the state from its `init`; refuses leaves that are not [B, ...]."""
        probe = cls(kind, strategy, jax.tree.map(_shape, state), batch)
        for path, leaf in jax.tree.leaves_with_path(probe.state):
            if leaf.shape[:1] != (batch,):
                which = jax.tree_util.keystr(path) or "itself"
                probe.refuse("init", f"must return a state whose leaves are [{batch},...]; {which} is {words(leaf)}")
        return probe

    def result(self, name: str, *arguments: Any, of: Callable[..., Any] | None = None) -> Any:
        """The shapes of the return value of the function `name`, or of `of`, which calls it."""
        with described(self.place(name), self.named(name)):
            return jax.eval_shape(of or getattr(self.strategy, name), *arguments)

    def place(self, name: str) -> str:
        """FILE:LINE of the function `name` or, if the package defines it, of the strategy's first user-defined one."""
        others = first_definition(self.strategy) if isinstance(self.strategy, Strategy) else ""
        return definition(getattr(self.strategy, name)) or others

    def named(self, name: str) -> str:
        """The field of the strategy and the qualified name of its function, for messages."""
        written = getattr(getattr(self.strategy, name), "__qualname__", "").replace(".<locals>", "")
        return f"the {self.kind}'s {name}" + (f" ({written})" if written not in ("", name) else "")

    def refuse(self, name: str, wrong: str) -> None:
        """Raises `Refused` with the line of a user's function."""
        place = self.place(name)
        raise Refused((f"{place}: " if place else "") + f"{self.named(name)} {wrong}")

    def parts_of(self, name: str, returned: Any, wanted: str, count: int) -> Any:
        """The returned value, which must be a plain tuple of `count` entries."""
        if not isinstance(returned, tuple) or len(returned) != count or hasattr(returned, "_fields"):
            self.refuse(name, f"must return {wanted}; it returns {words(returned)}")
        return returned

    def must_keep_state(self, name: str, after: Any) -> None:
        """Refuses a state whose structure, or a leaf's shape or type, changed: the loop carries it."""
        if jax.tree.structure(self.state) != jax.tree.structure(after):
            self.refuse(name, f"must return the state as it got it, {words(self.state)}; it returns {words(after)}")
        for (path, old), (_, new) in zip(*map(jax.tree.leaves_with_path, (self.state, after)), strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                leaf = jax.tree_util.keystr(path) or "itself"
                changed = f"{leaf} was {words(old)} and is {words(new)}"
                self.refuse(name, f"must return the state with its shapes: {changed}")


def _check_drafts(
    parts: Parts, params: ModelParams, sizes: Sizes, slots: int, state: DecodeState, source: Any
) -> tuple[Draft, Any]:
    """Checks the drafter's init, prefill, commit and source; returns the shapes of a draft and the drafter's state."""
    drafter, policy, batch = parts.drafter, parts.policy, sizes.batch
    keep_log_q, more = parts.verifier.needs_log_q, () if source is None else (source,)
    with described(first_definition(drafter), "the drafter's init"):
        begun = jax.eval_shape(lambda *source: drafter.init(params.drafter, batch, slots, *source), *more)
    probe = Probe("drafter", drafter, begun, batch)
    tokens, length = array(jnp.int32, batch, slots), array(jnp.int32, batch)
    for name in ("prefill", "commit"):
        if getattr(drafter, name) is not None:
            probe.must_keep_state(name, probe.result(name, params.drafter, begun, tokens, length))

    context, before = context_shapes(batch, state.monitor), jax.tree.map(_shape, state.policy)

    def drafted(params: Any, begun: Any, tokens: Any, context: Any, policy_state: Any) -> Any:
        source = drafter.source(params, begun, tokens, context)
        if not isinstance(source, Source):
            probe.refuse("source", f"must return a Source; it returns {words(source)}")
        log_q = empty_log_q(source, batch, sizes.max_draft_length, sizes.vocab_size, keep_log_q)
        uniform = lambda index: jnp.zeros((batch,), jnp.float32)  # noqa: E731
        _check_source(probe, source, sizes, context)
        end = draft_loop.draft(source, policy, policy_state, context, uniform, sizes.max_draft_length, log_q)
        closed = source.close(end)
        if not isinstance(closed, tuple) or len(closed) != 2 or not isinstance(closed[1], Drafted):
            probe.refuse("source", f"must close with (state, Drafted); its close returns {words(closed)}")
        return draft_of(closed[1]), closed[0]

    arguments = (params.drafter, begun, tokens, context, before)
    draft, after = probe.result("source", *arguments, of=drafted)
    wanted = draft_shapes(sizes, sizes.max_draft_length, keep_log_q)
    for name, field, shape in zip(wanted._fields, draft, wanted, strict=True):
        if field is None and (shape is None or name == "log_q"):  # None: drafts that were all chosen
            continue
        if shape is None or not _alike(field, shape):
            probe.refuse("source", f"must give a Draft.{name} as {words(shape)}; it is {words(field)}")
    probe.must_keep_state("source", after)
    return draft, begun


def _check_source(probe: Probe, source: Source, sizes: Sizes, context: RoundContext) -> None:
    """Checks the functions of a source, inside a trace."""
    batch = sizes.batch
    zeros, row = jnp.zeros((batch,), jnp.int32), array(jnp.int32, batch)
    memory = source.open(zeros == 0)
    before = jax.tree.map(_shape, memory)
    answer = source.predict(memory, zeros, jnp.zeros((batch,), jnp.float32))
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Next):
        probe.refuse("source", f"must predict (Next, memory); its predict returns {words(answer)}")
    following, after = answer
    if dims(following.token) != (batch,) or not jnp.issubdtype(following.token.dtype, jnp.integer):
        probe.refuse("source", f"must predict a token {words(row)}; it is {words(following.token)}")
    log_prob = following.distribution.log_prob
    if source.chosen is not True and dims(log_prob) != (batch, sizes.vocab_size):
        wanted = words(array(jnp.float32, batch, sizes.vocab_size))
        probe.refuse("source", f"must predict log_prob as {wanted}; it is {words(log_prob)}")
    for name, changed in (("predict", after), ("keep", source.keep(after, following.token, zeros == 0, zeros))):
        shapes = jax.tree.map(_shape, changed)
        if jax.tree.structure(shapes) != jax.tree.structure(before) or not all(
            map(_alike, jax.tree.leaves(shapes), jax.tree.leaves(before))
        ):
            probe.refuse("source", f"must keep its memory's shapes; its {name} does not")


def _check_observer(drafter: Drafter, params: ModelParams, state: Any, sizes: Sizes, slots: int) -> None:
    """Checks the result of a drafter's observer, and the state after `commit` and `prefill` with it."""
    observer, batch, longest = drafter.observe, sizes.batch, sizes.max_draft_length + 1
    if observer is None:
        return
    probe, count = Probe("drafter's observer", observer, state, batch), array(jnp.int32, batch)
    hidden = array(jnp.float32, batch, longest, len(observer.layers), observer.target_width)
    taken = probe.result("take", params.drafter, hidden)
    if any(dims(leaf)[:2] != (batch, longest) for leaf in jax.tree.leaves(taken)):
        probe.refuse("take", f"must return leaves [{batch},{longest},...]; it returns {words(taken)}")
    probe, arguments = Probe("drafter", drafter, state, batch), (array(jnp.int32, batch, slots), count)
    for name in ("commit", "prefill") if drafter.prefill else ("commit",):
        after = probe.result(name, params.drafter, state, *arguments, Seen(taken, count, count))
        probe.must_keep_state(name, after)


def check_monitor(monitor: Monitor, state: MonitorState, sizes: Sizes, widths: Sequence[int]) -> None:
    """Checks that a monitor keeps the shapes of its state at these pass widths. Raises as `check_policy`."""
    probe, context = Probe.of("monitor", monitor, state, sizes.batch), context_shapes(sizes.batch, state)
    for width in widths:
        logits = array(jnp.float32, sizes.batch, width, sizes.vocab_size)
        probe.must_keep_state("observe", probe.result("observe", probe.state, logits, _result(sizes), context))


def context_shapes(batch: int, monitor: MonitorState) -> RoundContext:
    whole, flags = array(jnp.int32, batch), array(jnp.bool_, batch)
    monitor = jax.tree.map(_shape, monitor)
    return RoundContext(whole, whole, whole, flags, array(jnp.uint32, batch), _warp(batch), monitor)


def draft_shapes(sizes: Sizes, held: int, keep_log_q: bool) -> Draft:
    """The shapes of a draft of at most `held` tokens."""
    whole = functools.partial(array, jnp.int32, sizes.batch)
    log_q = array(jnp.float32, sizes.batch, held, sizes.vocab_size) if keep_log_q else None
    return Draft(whole(held), log_q, array(jnp.bool_, sizes.batch, held), whole())


def _result(sizes: Sizes) -> VerificationResult:
    whole = functools.partial(array, jnp.int32, sizes.batch)
    return VerificationResult(whole(sizes.max_draft_length + 1), whole())


@functools.lru_cache(maxsize=64)
def distribution_shapes(batch: int, vocab_size: int, positions: int | None = None) -> Distribution:
    """The shapes of a Distribution [B, ...], or [B, T, ...] for T `positions`."""
    row = jax.eval_shape(distribution, array(jnp.float32, batch, vocab_size), _warp(batch))
    if positions is None:
        return row
    return jax.tree.map(lambda leaf: array(leaf.dtype, batch, positions, *leaf.shape[1:]), row)


def _warp(batch: int) -> Warp:
    return Warp(*(array(dtype, batch) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)))


def array(dtype: Any, *shape: int) -> Any:
    """A placeholder for an array of which only the shape and type matter."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def dims(leaf: Any) -> tuple[int, ...]:
    return getattr(leaf, "shape", ())


def _alike(first: Any, other: Any) -> bool:
    return (first.shape, first.dtype) == (other.shape, other.dtype)


def words(value: Any) -> str:
    """Type and shape as jax prints them, such as bool[2]; for other values their structure."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(map(words, value)) + ")"
    return type(value).__name__
