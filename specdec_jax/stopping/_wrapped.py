"""Rules around other rules: what a wrapper does not change stays the wrapped rule's."""

from collections.abc import Callable
from typing import Any

from specdec_jax.types import StoppingPolicy


def wrapped(policy: StoppingPolicy, **functions: Any) -> StoppingPolicy:
    """`policy` with other functions, for a wrapper whose state has the wrapped rule's as `policy`.

    Further fields of the rule that are functions of its state (`StoppingPolicy.forwarded`) get that part of it.
    """
    inner = {name: getattr(policy, name) for name in policy.forwarded}
    forwarded = {name: _of_inner(function) for name, function in inner.items() if function is not None}
    return policy.replace(**forwarded, **functions)


def _of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, *arguments: function(state.policy, *arguments)
