"""Checks what the functions of policies, verifiers, drafters and monitors return, before anything is compiled.

Only shapes are computed, by `jax.eval_shape`: every function is called on shapes and must return the wanted ones. A
wrong function is reported in one line, with the file and line of a user's function. The decoder checks nothing here:
`build_pair`, the proofs and the command line call `check_parts`, `check_policy` etc. for a user's functions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.rounds import ModelParams, Parts, draft_of, empty_log_q
from specdec_jax.decoding.sampling import distribution, distributions, make_warp
from specdec_jax.decoding.state import fresh_state
from specdec_jax.decoding.user_code import Refused, definition, described, first_definition, is_users
from specdec_jax.strategy import Strategy
from specdec_jax.types import (
    DecodeState,
    Distribution,
    Draft,
    LoopResult,
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
)
from specdec_jax.types.seams import no_threshold

LONGEST = 80  # characters of a record's fields in a message


class Sizes(NamedTuple):
    """The sizes that determine shapes."""

    batch: int
    vocab_size: int
    max_draft_length: int


class Probe(NamedTuple):
    """A strategy whose functions are checked, and the shapes of its state."""

    kind: str
    strategy: Any
    state: Any

    @classmethod
    def of(cls, kind: str, strategy: Any, state: Any, batch: int) -> "Probe":
        """The probe of a strategy and the state from its `init`; refuses leaves that are not [B, ...]."""
        probe = cls(kind, strategy, shapes_of(state))
        for path, leaf in jax.tree.leaves_with_path(probe.state):
            if leaf.shape[:1] != (batch,):
                which = jax.tree_util.keystr(path) or "itself"
                probe.refuse("init", f"must return a state whose leaves are [{batch},...]; {which} is {words(leaf)}")
        return probe

    def returns(self, name: str, arguments: Sequence[Any], wanted: Any) -> None:
        """Refuses a function `name` that does not return the wanted shapes."""
        self.must_be(name, self.result(name, *arguments), wanted)

    def result(self, name: str, *arguments: Any, of: Callable[..., Any] | None = None) -> Any:
        """The shapes of the return value of the function `name`, or of `of`, which calls it."""
        with described(self.place(name), self.named(name)):
            return jax.eval_shape(of or getattr(self.strategy, name), *arguments)

    def must_be(self, name: str, returned: Any, wanted: Any, action: str = "return", *, loose: int = 0) -> None:
        """Refuses other trees, shapes and types than the wanted ones.

        The first `loose` leaves may be of any float type for a float, and of any integer type for an integer.
        """
        if jax.tree.structure(returned) != jax.tree.structure(wanted):
            self.refuse(name, f"must {action} {words(wanted)}, not {words(returned)}")
        leaves = zip(jax.tree.leaves_with_path(returned), jax.tree.leaves(wanted), strict=True)
        for index, ((path, leaf), right) in enumerate(leaves):
            alike = leaf.dtype == right.dtype
            for kind in (jnp.floating, jnp.integer) if index < loose else ():
                alike |= jnp.issubdtype(leaf.dtype, kind) and jnp.issubdtype(right.dtype, kind)
            if leaf.shape != right.shape or not alike:
                which = jax.tree_util.keystr(path)
                there = f": {which} is {words(leaf)}" if which else f", not {words(leaf)}"
                self.refuse(name, f"must {action} {words(wanted)}{there}")

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


def check_parts(parts: Parts, params: ModelParams) -> None:
    """Checks the policy, and a user's drafter, verifier and monitor, for two rows, before anything is compiled.

    Raises:
        ValueError: a function fails or returns other shapes. One line: the file and line of a user's function, its
            name, and its actual and required return value, or the error that it raises.
    """
    policy, drafter, verifier = parts.policy, parts.drafter, parts.verifier
    longest = drafter.max_draft_length
    places = map(first_definition, (policy, verifier, parts.monitor))
    with described(next(filter(None, places), ""), "init"):
        sources = None if parts.target.spec.source is None else [[0], [0]]
        state, source = fresh_state(parts, [[0], [0]], sources=sources, max_new_tokens=0)
    sizes = Sizes(2, parts.target.spec.vocab_size, longest)
    check_policy(policy, state.policy, state.monitor, sizes, keep_log_q=verifier.needs_log_q)
    if is_users(drafter) or is_users(verifier):
        keep_log_q = _check_drafter(parts, params, sizes, state, source)
        if is_users(verifier):
            for held in sorted({min(width - 1, longest) for width in parts.widths}):
                few = sizes._replace(max_draft_length=held)
                check_verifier(verifier, state.verifier, few, state.monitor, keep_log_q=keep_log_q)
                if policy.tree_hooks is not None:
                    policy.tree_hooks.check_verifier(policy, verifier, state.verifier, few, state.monitor)
    if is_users(parts.monitor):
        probe, context = Probe.of("monitor", parts.monitor, state.monitor, 2), context_shapes(2, state.monitor)
        for width in parts.widths:
            logits = array(jnp.float32, 2, width, sizes.vocab_size)
            probe.returns("observe", (probe.state, logits, result_shapes(sizes), context), probe.state)


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
    probe, rows = Probe.of("policy", policy, state, sizes.batch), lambda dtype: array(dtype, sizes.batch)
    before, count, answer = probe.state, rows(jnp.int32), (rows(jnp.bool_), probe.state)
    # one cost per row, as with several drafters
    context = context_shapes(sizes.batch, monitor)._replace(relative_drafter_cost=rows(jnp.float32))
    seen = distribution_shapes(sizes.batch, sizes.vocab_size)
    probe.returns("begin", (before, context), answer)
    probe.returns("check", (before, seen, count, context), answer)
    probe.returns("proceed", (before, seen, count, count, context), answer)
    learnt_from: tuple[Any, Any] = draft_shapes(sizes, keep_log_q), result_shapes(sizes)
    if policy.tree_hooks is not None:
        learnt_from = policy.tree_hooks.check_answers(probe, policy, sizes, context, keep_log_q)
    probe.returns("update", (before, *learnt_from), before)
    if policy.threshold is not no_threshold:
        probe.must_be("threshold", probe.result("threshold", before), rows(jnp.float32), loose=1)


def check_verifier(
    verifier: Verifier, state: VerifierState, sizes: Sizes, monitor: MonitorState = (), *, keep_log_q: bool = True
) -> None:
    """Checks that a verifier accepts drafts of up to K tokens and returns what `Verify` requires. As `check_policy`.

    `keep_log_q`: whether drafts have distributions, which tokens that were all chosen have not.
    """
    batch, longest, vocab = sizes.batch, sizes.max_draft_length, sizes.vocab_size
    probe = Probe.of("verifier", verifier, state, batch)
    draft = draft_shapes(sizes, keep_log_q and verifier.needs_log_q)
    target, context = distribution_shapes(batch, vocab, longest + 1), context_shapes(batch, monitor)

    def verify(state: Any, draft: Any, target: Any, accepted: Any, context: Any) -> Any:
        returned = verifier.verify(state, draft, target, context)
        if not isinstance(returned, tuple) or len(returned) != 3 or not callable(returned[1]):
            wanted = "(log_prob_accepted, next_distribution, state), the second a function"
            probe.refuse("verify", f"must return {wanted}, not {words(returned)}")
        with described(definition(returned[1]), "the verifier's next_distribution"):
            return returned[0], returned[1](accepted), returned[2]

    arguments = probe.state, draft, target, array(jnp.int32, batch), context
    wanted = array(jnp.float32, batch, longest + 1), array(jnp.float32, batch, vocab), probe.state
    probe.must_be("verify", probe.result("verify", *arguments, of=verify), wanted, loose=2)


def _check_drafter(parts: Parts, params: ModelParams, sizes: Sizes, state: DecodeState, source: Any) -> bool:
    """Checks the drafter's init, prefill, commit, source and observer, by a whole draft loop.

    Returns whether its drafts have distributions for the verifier.
    """
    drafter, policy, batch = parts.drafter, parts.policy, sizes.batch
    with described(first_definition(drafter), "the drafter's init"):
        more = () if source is None else (source,)
        slots = state.tokens.shape[1]
        begun = jax.eval_shape(lambda *source: drafter.init(params.drafter, batch, slots, *source), *more)
    probe, text = Probe("drafter", drafter, begun), (array(jnp.int32, batch, slots), array(jnp.int32, batch))
    feeding = [name for name in ("prefill", "commit") if getattr(drafter, name) is not None]
    for name in feeding:
        probe.returns(name, (params.drafter, begun, *text), begun)

    def drafted(params: Any, begun: Any, tokens: Any, context: Any, policy_state: Any) -> Any:
        source = drafter.source(params, begun, tokens, context)
        if not isinstance(source, Source):
            probe.refuse("source", f"must return a Source, not {words(source)}")
        rows, uniform = jnp.zeros((batch,), jnp.int32), lambda index: jnp.zeros((batch,), jnp.float32)
        memory = source.open(rows == 0)
        answer = source.predict(memory, rows, uniform(0))
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Next):
            probe.refuse("source", f"must predict (Next, memory), not {words(answer)}")
        following, after = answer
        probe.must_be("source", shapes_of(following.token), shapes_of(rows), "predict a token", loose=1)
        if source.chosen is not True:
            probs = array(jnp.float32, batch, sizes.vocab_size)
            probe.must_be("source", shapes_of(following.distribution.log_prob), probs, "predict log_prob", loose=1)
        longer = source.keep(after, following.token, rows == 0, rows)
        for action, changed in (("predict with a memory", after), ("keep a memory", longer)):
            probe.must_be("source", shapes_of(changed), shapes_of(memory), action)
        log_q = empty_log_q(source, batch, sizes.max_draft_length, sizes.vocab_size, parts.verifier.needs_log_q)
        closed = source.close(
            draft_loop.draft(source, policy, policy_state, context, uniform, sizes.max_draft_length, log_q)
        )
        if not isinstance(closed, tuple) or len(closed) != 2 or not isinstance(closed[1], LoopResult):
            probe.refuse("source", f"must close with (state, LoopResult), not {words(closed)}")
        return draft_of(closed[1]), closed[0]

    context = context_shapes(batch, state.monitor)
    arguments = params.drafter, begun, text[0], context, shapes_of(state.policy)
    returned = probe.result("source", *arguments, of=drafted)
    keep_log_q = parts.verifier.needs_log_q and returned[0].log_q is not None  # None: drafts that were all chosen
    probe.must_be("source", returned, (draft_shapes(sizes, keep_log_q), begun))
    if drafter.observe is not None:
        observer, longest = drafter.observe, sizes.max_draft_length + 1
        hidden = array(jnp.float32, batch, longest, len(observer.layers), observer.target_width)
        watcher = Probe("drafter's observer", observer, begun)
        features = watcher.result("features", params.drafter, hidden)
        if any(leaf.shape[:2] != (batch, longest) for leaf in jax.tree.leaves(features)):
            watcher.refuse("features", f"must return leaves [{batch},{longest},...]; it returns {words(features)}")
        for name in feeding:
            probe.returns(name, (params.drafter, begun, *text, Seen(features, text[1], text[1])), begun)
    return keep_log_q


def context_shapes(batch: int, monitor: MonitorState) -> RoundContext:
    whole, flags, seed = (array(dtype, batch) for dtype in (jnp.int32, jnp.bool_, jnp.uint32))
    return RoundContext(whole, whole, whole, flags, seed, *shapes_of((make_warp(batch), monitor)))


def draft_shapes(sizes: Sizes, keep_log_q: bool) -> Draft:
    """The shapes of a draft of at most K tokens."""
    held = sizes.batch, sizes.max_draft_length
    log_q = array(jnp.float32, *held, sizes.vocab_size) if keep_log_q else None
    return Draft(array(jnp.int32, *held), log_q, array(jnp.bool_, *held), array(jnp.int32, sizes.batch))


def result_shapes(sizes: Sizes) -> VerificationResult:
    return VerificationResult(array(jnp.int32, sizes.batch, sizes.max_draft_length + 1), array(jnp.int32, sizes.batch))


@functools.lru_cache(maxsize=64)
def distribution_shapes(batch: int, vocab_size: int, positions: int | None = None) -> Distribution:
    """The shapes of a Distribution [B, ...], or [B, T, ...] for T `positions`."""
    shape = (batch, vocab_size) if positions is None else (batch, positions, vocab_size)
    function = distribution if positions is None else distributions
    return jax.eval_shape(function, array(jnp.float32, *shape), make_warp(batch))


def array(dtype: Any, *shape: int) -> Any:
    """A placeholder for an array of which only the shape and type matter."""
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: array(jnp.result_type(leaf), *jnp.shape(leaf)), tree)


def words(value: Any) -> str:
    """Type and shape as jax prints them, such as bool[2]; for other values their structure."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if not isinstance(value, tuple):
        return type(value).__name__
    names = getattr(value, "_fields", None)
    if names is None:
        return "(" + ", ".join(map(words, value)) + ")"
    fields = ", ".join(f"{name} {words(field)}" for name, field in zip(names, value, strict=True))
    return f"{type(value).__name__}({fields})" if len(fields) <= LONGEST else type(value).__name__
