"""What a stopping policy's functions return, looked at before a draft loop is built around them.

Nothing is computed: `jax.eval_shape` tells the shapes. Inside the loop a wrong one is broadcast over the rows, or fails
deep in jax with a message about carries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.decoding.sampling import distribution
from specdec_jax.types import (
    Distribution,
    Draft,
    MonitorState,
    PolicyState,
    RoundContext,
    StoppingPolicy,
    VerificationResult,
    Wanted,
    Warp,
)


def check_answers(
    policy: StoppingPolicy,
    state: PolicyState,
    monitor: MonitorState = (),
    *,
    batch: int,
    vocab_size: int,
    max_draft_length: int,
) -> None:
    """Refuses a policy whose functions do not answer each row by itself, or do not keep their state's shapes.

    Args:
        state, monitor: what `policy.init(batch, ...)` and the monitor's `init(batch, ...)` gave; arrays, tracers or
            shapes, only shapes are read. A policy that reads phases needs the state of a monitor that watches them.

    Raises:
        ValueError: names the function, and what it returns against what it must.
    """
    state, monitor = jax.tree.map(_shape, (state, monitor))
    whole, flags = _array(jnp.int32, batch), _array(jnp.bool_, batch)
    relative = _array(jnp.float32, batch)  # as several drafters tell it
    context = RoundContext(whole, whole, whole, flags, _array(jnp.uint32, batch), _warp(batch), monitor, relative)
    seen = _distribution(batch, vocab_size)
    for name, arguments in (
        ("begin", (context,)),
        ("check", (seen, whole, context)),
        ("proceed", (seen, whole, whole, context)),
    ):
        function = getattr(policy, name)
        returned = jax.eval_shape(function, state, *arguments)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"{_named(name, function)} must return (answer, state); it returns {_said(returned)}")
        answer, after = returned
        if not isinstance(answer, jax.ShapeDtypeStruct) or (answer.shape, answer.dtype) != (flags.shape, flags.dtype):
            wanted = (
                f"{_said(flags)}, one answer for each of {batch} rows" if batch > 1 else f"{_said(flags)} for one row"
            )
            raise ValueError(f"{_named(name, function)} must answer {wanted}; it answers {_said(answer)}")
        _check_state(name, function, state, after)
    _check_beside(policy, state, whole, context, max_draft_length)
    draft = Draft(
        _array(jnp.int32, batch, max_draft_length),
        _array(jnp.float32, batch, max_draft_length, vocab_size),
        _array(jnp.bool_, batch, max_draft_length),
        whole,
    )
    result = VerificationResult(_array(jnp.int32, batch, max_draft_length + 1), whole)
    _check_state("update", policy.update, state, jax.eval_shape(policy.update, state, draft, result))


def _check_beside(policy: StoppingPolicy, state: Any, whole: Any, context: RoundContext, most: int) -> None:
    """What a rule with siblings wants beside drafts: a number for each of the first N drafts, and of each expansion."""
    if policy.beside is None:
        return
    batch, expansions = whole.shape[0], policy.expanded * (most - 1)
    parent = _array(jnp.int32, batch, expansions) if expansions else None
    wanted = jax.eval_shape(policy.beside, state, whole, whole, context, parent)
    siblings, children = (getattr(getattr(wanted, name, None), "shape", ()) for name in Wanted._fields)
    if len(siblings) != 2 or siblings[0] != batch or (expansions and children != (batch, expansions)):
        told = f"Wanted(siblings int32[{batch},N]" + (f", children int32[{batch},{expansions}])" if expansions else ")")
        raise ValueError(f"{_named('beside', policy.beside)} must return {told}; it returns {_said(wanted)}")
    if policy.expand is not None:
        worth = jax.eval_shape(policy.expand, state, whole, context)
        shape = getattr(worth, "shape", ())
        if len(shape) != 3 or (shape[0], shape[2]) != (batch, policy.siblings):
            told = f"float32[{batch},N,{policy.siblings}], a number for each sibling of the first N drafts"
            raise ValueError(f"{_named('expand', policy.expand)} must answer {told}; it answers {_said(worth)}")


@functools.lru_cache(maxsize=16)
def _distribution(batch: int, vocab_size: int) -> Distribution:
    return jax.eval_shape(distribution, _array(jnp.float32, batch, vocab_size), _warp(batch))


def _warp(batch: int) -> Warp:
    return Warp(*(_array(dtype, batch) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)))


def _array(dtype: Any, *shape: int) -> Any:
    """Stands for an array where only its shape is read."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_state(name: str, function: Callable[..., Any], before: PolicyState, after: PolicyState) -> None:
    """Its structure, and every leaf's shape and type: the loop carries it."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"{_named(name, function)} must return the state as it got it, {_said(before)}; it returns {_said(after)}"
        )
    for (path, old), (_, new) in zip(*map(jax.tree.leaves_with_path, (before, after)), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            leaf = jax.tree_util.keystr(path) or "itself"
            raise ValueError(
                f"{_named(name, function)} must return the state with its shapes: {leaf} was {_said(old)} and is "
                f"{_said(new)}"
            )


def _named(name: str, function: Callable[..., Any]) -> str:
    """The field of StoppingPolicy, and the function where it was written."""
    written = getattr(function, "__qualname__", "").replace(".<locals>", "")
    return f"the policy's {name}" + (f" ({written})" if written not in ("", name) else "")


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _said(value: Any) -> str:
    """A shape as jax writes it, such as bool[2]; of anything else its structure."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(map(_said, value)) + ")"
    return type(value).__name__
