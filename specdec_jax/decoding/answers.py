"""What the functions of policies, verifiers, drafters and monitors return, looked at before a program is built of them.

Nothing is computed: `jax.eval_shape` gives the shapes. Inside a loop a wrong one is broadcast over the rows, or fails
deep in jax with a message about carries. Every error is one line, with the file and line of a user's function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.rounds import ModelParams, Parts
from specdec_jax.decoding.sampling import distribution
from specdec_jax.decoding.user_code import Refused, definition, described, first_definition, is_users
from specdec_jax.strategy import Strategy
from specdec_jax.types import (
    Children,
    DecodeState,
    Distribution,
    Draft,
    Drafter,
    DraftInfo,
    Monitor,
    MonitorState,
    PolicyState,
    RoundContext,
    SiblingOutcomes,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    VerifierState,
    Wanted,
    Warp,
)


class Sizes(NamedTuple):
    """What shapes are made of."""

    batch: int
    vocab_size: int
    max_draft_length: int
    siblings: int = 0
    expanded: int = 0

    @property
    def expansions(self) -> int:
        """Of a round: its first drafter pass is fed with no siblings."""
        return self.expanded * (self.max_draft_length - 1)


def check_parts(parts: Parts, params: ModelParams, state: DecodeState, source: Any = None) -> None:
    """Refuses a policy, and what a user's file has of a drafter, verifier or monitor, whose functions fail or return
    something else than the decoder takes; at the sizes of `state`, a request that is not prefilled.

    Raises:
        ValueError: one line: the file and line of a user's function, its name, and what it returns against what it
            must, or the error that it raises.
    """
    policy, drafter, verifier = parts.policy, parts.drafter, parts.verifier
    batch, slots = state.tokens.shape
    most = drafter.max_draft_length
    sizes = Sizes(batch, parts.target.spec.vocab_size, most, policy.siblings, policy.expanded)
    check_policy(policy, state.policy, state.monitor, sizes, keep_log_q=verifier.needs_log_q)
    context, drafts = _context(batch, state.monitor), _draft(sizes, most, verifier.needs_log_q)
    drafter_state: Any = ()
    if is_users(drafter) or is_users(verifier):
        drafts, drafter_state = _check_drafts(parts, params, sizes, slots, state, source)
    if is_users(verifier):
        for held in sorted({min(width - 1, most) for width in parts.widths}):
            check_verifier(verifier, state.verifier, sizes, state.monitor, _first(drafts, held))
    if is_users(drafter):
        _check_observer(drafter, params, drafter_state, context, sizes, slots, drafts)
    if is_users(parts.monitor):
        check_monitor(parts.monitor, state.monitor, sizes, parts.widths)


def check_policy(
    policy: StoppingPolicy,
    state: PolicyState,
    monitor: MonitorState,
    sizes: Sizes,
    *,
    keep_log_q: bool = True,
) -> None:
    """Refuses a policy whose functions do not answer each row by itself, or do not keep their state's shapes.

    Args:
        state, monitor: what `policy.init(batch, ...)` and the monitor's `init(batch, ...)` gave; arrays, tracers or
            shapes, only shapes are read. A policy that reads phases needs the state of a monitor that watches them.

    Raises:
        ValueError: names the function, and what it returns against what it must.
    """
    asked = _asked("policy", policy, state, sizes.batch)
    batch = sizes.batch
    whole, flags = _array(jnp.int32, batch), _array(jnp.bool_, batch)
    relative = _array(jnp.float32, batch)  # as several drafters give it
    context = _context(batch, monitor)._replace(relative_drafter_cost=relative)
    seen = _distribution(batch, sizes.vocab_size)
    for name, arguments in (
        ("begin", (context,)),
        ("check", (seen, whole, context)),
        ("proceed", (seen, whole, whole, context)),
    ):
        answer, after = asked.parts_of(name, asked.result(name, asked.state, *arguments), "(answer, state)", 2)
        wanted = f"{_said(flags)}, one answer for each of {batch} rows" if batch > 1 else f"{_said(flags)} for one row"
        asked.must_answer(name, answer, flags, wanted)
        asked.must_keep_state(name, after)
    _check_siblings(asked, sizes, whole, context)
    draft = _draft(sizes, sizes.max_draft_length, keep_log_q)
    asked.must_keep_state("update", asked.result("update", asked.state, draft, _result(sizes)))
    shown = asked.result("threshold", asked.state)
    if _dims(shown) != (batch,):
        asked.refuse("threshold", f"must answer float32[{batch}]; it answers {_said(shown)}")


def check_verifier(
    verifier: Verifier,
    state: VerifierState,
    sizes: Sizes,
    monitor: MonitorState = (),
    draft: Draft | None = None,
) -> None:
    """Refuses a verifier whose functions fail on a draft of some length, or return something else than the seam says.

    Args:
        state, monitor: as of `check_policy`.
        draft: its shapes; as long as `sizes` says unless given.

    Raises:
        ValueError: as `check_policy`.
    """
    batch, vocab = sizes.batch, sizes.vocab_size
    context = _context(batch, monitor)
    draft = _draft(sizes, sizes.max_draft_length, verifier.needs_log_q) if draft is None else draft
    asked = _asked("verifier", verifier, state, batch)
    target, accepted = _distribution(batch, vocab, draft.tokens.shape[1] + 1), _array(jnp.int32, batch)

    def played(state: Any, draft: Any, target: Any, accepted: Any, context: Any) -> Any:
        returned = verifier.verify(state, draft, target, context)
        wanted = "(log_prob_accepted, next_distribution, state)"
        log_prob, following, after = asked.parts_of("verify", returned, wanted, 3)
        if not callable(following):
            asked.refuse("verify", f"must return a function as next_distribution; it returns {_said(following)}")
        with described(definition(following), "the verifier's next_distribution"):
            return log_prob, following(accepted), after

    log_prob, following, after = asked.result("verify", asked.state, draft, target, accepted, context, of=played)
    for name, answer, shape in (
        ("log_prob_accepted", log_prob, (batch, draft.tokens.shape[1] + 1)),
        ("next_distribution's answer", following, (batch, vocab)),
    ):
        if _dims(answer) != shape or not jnp.issubdtype(answer.dtype, jnp.floating):
            wanted, drafts = _said(_array(jnp.float32, *shape)), draft.tokens.shape[1]
            asked.refuse("verify", f"must give {name} as {wanted} of {drafts} drafts; it is {_said(answer)}")
    asked.must_keep_state("verify", after)
    if verifier.outcomes is not None and draft.beside is not None:
        ends = asked.result("outcomes", draft, target, accepted, context)
        most = sizes.siblings
        shapes = SiblingOutcomes((batch, most + 1), (batch, most), (batch, vocab))  # type: ignore[arg-type]
        wanted = f"SiblingOutcomes(float32[{batch},{most + 1}], int32[{batch},{most}], float32[{batch},{vocab}])"
        if not isinstance(ends, SiblingOutcomes) or tuple(map(_dims, ends)) != shapes:
            asked.refuse("outcomes", f"must return {wanted}; it returns {_said(ends)}")


class _Asked(NamedTuple):
    """A strategy whose functions are asked, and its state's shapes."""

    kind: str
    strategy: Any
    state: Any
    batch: int

    def result(self, name: str, *arguments: Any, of: Callable[..., Any] | None = None) -> Any:
        """The shapes of what the function of that name returns, or of what `of` returns, which calls it."""
        with described(self.place(name), self.named(name)):
            return jax.eval_shape(of or getattr(self.strategy, name), *arguments)

    def place(self, name: str) -> str:
        """FILE:LINE of the function of that name or, where that is the package's, of another that is a user's."""
        others = first_definition(self.strategy) if isinstance(self.strategy, Strategy) else ""
        return definition(getattr(self.strategy, name)) or others

    def named(self, name: str) -> str:
        """The field of the strategy, and the function where it was written."""
        written = getattr(getattr(self.strategy, name), "__qualname__", "").replace(".<locals>", "")
        return f"the {self.kind}'s {name}" + (f" ({written})" if written not in ("", name) else "")

    def refuse(self, name: str, wrong: str) -> None:
        """Raises `Refused` with the line of a user's function."""
        place = self.place(name)
        raise Refused((f"{place}: " if place else "") + f"{self.named(name)} {wrong}")

    def parts_of(self, name: str, returned: Any, wanted: str, count: int) -> Any:
        """What was returned, a tuple of so many."""
        if not isinstance(returned, tuple) or len(returned) != count or hasattr(returned, "_fields"):
            self.refuse(name, f"must return {wanted}; it returns {_said(returned)}")
        return returned

    def must_answer(self, name: str, answer: Any, shape: Any, wanted: str) -> None:
        """An array of that shape and type."""
        if not isinstance(answer, jax.ShapeDtypeStruct) or (answer.shape, answer.dtype) != (shape.shape, shape.dtype):
            self.refuse(name, f"must answer {wanted}; it answers {_said(answer)}")

    def must_keep_state(self, name: str, after: Any) -> None:
        """Its structure, and every leaf's shape and type: the loop carries it."""
        if jax.tree.structure(self.state) != jax.tree.structure(after):
            said = f"{_said(self.state)}; it returns {_said(after)}"
            self.refuse(name, f"must return the state as it got it, {said}")
        for (path, old), (_, new) in zip(*map(jax.tree.leaves_with_path, (self.state, after)), strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                leaf = jax.tree_util.keystr(path) or "itself"
                changed = f"{leaf} was {_said(old)} and is {_said(new)}"
                self.refuse(name, f"must return the state with its shapes: {changed}")


def _asked(kind: str, strategy: Any, state: Any, batch: int) -> _Asked:
    """A strategy and the state that its `init` gave, every leaf of it [B, ...]."""
    asked = _Asked(kind, strategy, jax.tree.map(_shape, state), batch)
    for path, leaf in jax.tree.leaves_with_path(asked.state):
        if leaf.shape[:1] != (batch,):
            which = jax.tree_util.keystr(path) or "itself"
            asked.refuse("init", f"must return a state whose leaves are [{batch},...]; {which} is {_said(leaf)}")
    return asked


def _check_siblings(asked: _Asked, sizes: Sizes, whole: Any, context: RoundContext) -> None:
    """What a rule with siblings wants beside drafts: a number for each of the first N drafts, and of each expansion."""
    policy, batch, expansions = asked.strategy, sizes.batch, sizes.expansions
    if policy.beside is None:
        return
    parent = _array(jnp.int32, batch, expansions) if expansions else None
    wanted = asked.result("beside", asked.state, whole, whole, context, parent)
    siblings, children = (_dims(getattr(wanted, name, None)) for name in Wanted._fields)
    whole_numbers = all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(wanted))
    is_wanted = isinstance(wanted, Wanted) and whole_numbers and len(siblings) == 2 and siblings[0] == batch
    if not is_wanted or (expansions and children != (batch, expansions)):
        said = f"Wanted(siblings int32[{batch},N]" + (f", children int32[{batch},{expansions}])" if expansions else ")")
        asked.refuse("beside", f"must return {said}; it returns {_said(wanted)}")
    if policy.expand is not None:
        worth = asked.result("expand", asked.state, whole, context)
        shape = _dims(worth)
        if len(shape) != 3 or (shape[0], shape[2]) != (batch, policy.siblings):
            said = f"float32[{batch},N,{policy.siblings}], a number for each sibling of the first N drafts"
            asked.refuse("expand", f"must answer {said}; it answers {_said(worth)}")


def _check_drafts(
    parts: Parts, params: ModelParams, sizes: Sizes, slots: int, state: DecodeState, source: Any
) -> tuple[Draft, Any]:
    """The shapes of a round's draft and of the drafter's state, of a drafter that fills, proposes and commits."""
    drafter, policy, batch = parts.drafter, parts.policy, sizes.batch
    keep_log_q, more = parts.verifier.needs_log_q, () if source is None else (source,)
    with described(first_definition(drafter), "the drafter's init"):
        begun = jax.eval_shape(lambda *source: drafter.init(params.drafter, batch, slots, *source), *more)
    asked = _Asked("drafter", drafter, begun, batch)
    tokens, length = _array(jnp.int32, batch, slots), _array(jnp.int32, batch)
    for name in ("prefill", "commit"):
        if getattr(drafter, name) is not None:
            asked.must_keep_state(name, asked.result(name, params.drafter, begun, tokens, length))

    def proposed(params: Any, begun: Any, tokens: Any, context: Any, policy_state: Any) -> Any:
        zeros = jnp.zeros((batch,), jnp.float32)
        given = (params, begun, tokens, context, lambda step: zeros, policy, policy_state, keep_log_q)
        wanted = "(Draft, DraftInfo, drafter's state, policy's state)"
        return asked.parts_of("propose", drafter.propose(*given), wanted, 4)

    context, before = _context(batch, state.monitor), jax.tree.map(_shape, state.policy)
    arguments = (params.drafter, begun, tokens, context, before)
    draft, info, after, learnt = asked.result("propose", *arguments, of=proposed)
    _check_fields(asked, draft, _draft(sizes, sizes.max_draft_length, keep_log_q)._replace(beside=None))
    measured, statistic = _array(jnp.int32, batch), _array(jnp.float32, batch, sizes.max_draft_length)
    _check_fields(asked, info, DraftInfo(measured, measured, statistic, statistic, measured))
    asked.must_keep_state("propose", after)
    asked._replace(state=before).must_keep_state("propose", learnt)
    if sizes.siblings:
        draft = draft._replace(beside=_array(jnp.int32, batch, sizes.max_draft_length))
    return draft, begun


def _check_fields(asked: _Asked, made: Any, wanted: Any) -> None:
    """A draft, or what was measured of it, field by field. Log q may be None: of drafts that were all chosen."""
    kind = type(wanted).__name__
    if not isinstance(made, type(wanted)):
        asked.refuse("propose", f"must return a {kind}; it returns {_said(made)}")
    for name, field, shape in zip(wanted._fields, made, wanted, strict=True):
        if field is None and (shape is None or name == "log_q"):
            continue
        fits = jax.tree.structure(field) == jax.tree.structure(shape)
        described_alike = fits and all(map(_alike, jax.tree.leaves(field), jax.tree.leaves(shape)))
        if not described_alike:
            asked.refuse("propose", f"must return {kind}.{name} as {_said(shape)}; it is {_said(field)}")


def _check_observer(
    drafter: Drafter, params: ModelParams, state: Any, context: RoundContext, sizes: Sizes, slots: int, draft: Draft
) -> None:
    """What a drafter reads of the target, and its state once it was given that."""
    observer, batch, longest = drafter.observer, sizes.batch, sizes.max_draft_length + 1
    asked = _Asked("drafter's observer", observer, state, batch)
    if observer.read is not None and observer.learn is not None:
        seen = asked.result("read", _distribution(batch, sizes.vocab_size, longest), draft, _result(sizes), context)
        if any(_dims(leaf)[:2] != (batch, longest) for leaf in jax.tree.leaves(seen)):
            asked.refuse("read", f"must return leaves [{batch},{longest},...]; it returns {_said(seen)}")
        tokens = _array(jnp.int32, batch, slots)
        asked.must_keep_state("learn", asked.result("learn", params.drafter, state, seen, draft, tokens, context))
    features = observer.features
    if features is not None:
        asked, count = _Asked("drafter's features", features, state, batch), _array(jnp.int32, batch)
        hidden = _array(jnp.float32, batch, longest, len(features.layers), features.target_width)
        stored = asked.result("keep", params.drafter, hidden)
        if any(_dims(leaf)[:2] != (batch, longest) for leaf in jax.tree.leaves(stored)):
            asked.refuse("keep", f"must return leaves [{batch},{longest},...]; it returns {_said(stored)}")
        asked.must_keep_state("learn", asked.result("learn", params.drafter, state, stored, count, count))


def check_monitor(monitor: Monitor, state: MonitorState, sizes: Sizes, widths: Sequence[int]) -> None:
    """Refuses a monitor that changes its state's shapes in passes of these widths. Raises as `check_policy`."""
    asked, context = _asked("monitor", monitor, state, sizes.batch), _context(sizes.batch, state)
    for width in widths:
        logits = _array(jnp.float32, sizes.batch, width, sizes.vocab_size)
        result = _result(sizes)._replace(beside=None)
        asked.must_keep_state("observe", asked.result("observe", asked.state, logits, result, context))


def _context(batch: int, monitor: MonitorState) -> RoundContext:
    whole, flags = _array(jnp.int32, batch), _array(jnp.bool_, batch)
    monitor = jax.tree.map(_shape, monitor)
    return RoundContext(whole, whole, whole, flags, _array(jnp.uint32, batch), _warp(batch), monitor)


def _draft(sizes: Sizes, held: int, keep_log_q: bool) -> Draft:
    """A draft of at most `held` tokens."""
    batch, most, count = sizes.batch, sizes.siblings, sizes.expansions
    whole, siblings, children = functools.partial(_array, jnp.int32, batch), None, None
    if most:
        siblings = whole(held, most)
    if count:
        log_q = _array(jnp.float32, batch, count, sizes.vocab_size) if keep_log_q else None
        children = Children(whole(count), whole(count, most), log_q, whole(count))
    log_q = _array(jnp.float32, batch, held, sizes.vocab_size) if keep_log_q else None
    flags = _array(jnp.bool_, batch, held)
    return Draft(whole(held), log_q, flags, whole(), siblings, whole(held) if most else None, children)


def _first(draft: Draft, held: int) -> Draft:
    """The shapes of the first `held` drafts, with their siblings."""

    def cut(leaf: Any) -> Any:
        return None if leaf is None else _array(leaf.dtype, leaf.shape[0], held, *leaf.shape[2:])

    drafts = {name: cut(getattr(draft, name)) for name in ("tokens", "log_q", "one_hot", "siblings", "beside")}
    few = draft._replace(**drafts)
    return few if held else few._replace(siblings=None, beside=None, children=None)


def _result(sizes: Sizes) -> VerificationResult:
    whole = functools.partial(_array, jnp.int32, sizes.batch)
    return VerificationResult(whole(sizes.max_draft_length + 1), whole(), whole() if sizes.siblings else None)


@functools.lru_cache(maxsize=64)
def _distribution(batch: int, vocab_size: int, positions: int | None = None) -> Distribution:
    """Of every row, or of every row's positions."""
    one = jax.eval_shape(distribution, _array(jnp.float32, batch, vocab_size), _warp(batch))
    if positions is None:
        return one
    return jax.tree.map(lambda leaf: _array(leaf.dtype, batch, positions, *leaf.shape[1:]), one)


def _warp(batch: int) -> Warp:
    return Warp(*(_array(dtype, batch) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)))


def _array(dtype: Any, *shape: int) -> Any:
    """Stands for an array where only its shape is read."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _dims(leaf: Any) -> tuple[int, ...]:
    return getattr(leaf, "shape", ())


def _alike(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _said(value: Any) -> str:
    """A shape as jax writes it, such as bool[2]; of anything else its structure."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(map(_said, value)) + ")"
    return type(value).__name__
