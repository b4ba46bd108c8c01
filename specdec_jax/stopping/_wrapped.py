"""Rules around other rules: what a wrapper does not change stays the wrapped rule's."""

from collections.abc import Callable
from typing import Any

from specdec_jax.types import StoppingPolicy


def wrapped(policy: StoppingPolicy, **functions: Any) -> StoppingPolicy:
    """`policy` with other functions, for a wrapper whose state has the wrapped rule's as `policy`.

    Functions that are not given are the rule's on that part of the state, the fields that
    `StoppingPolicy.forwarded` names among them.
    """
    answers = {name: getattr(policy, name) for name in ("threshold", *policy.forwarded)}
    inner = {name: _of_inner(function) for name, function in answers.items() if function is not None}
    inner |= {name: _decision(getattr(policy, name)) for name in ("begin", "check", "proceed")}

    def update(state: Any, *arguments: Any) -> Any:
        return state._replace(policy=policy.update(state.policy, *arguments))

    return policy.replace(**{**inner, "update": update, **functions})


def _of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, *arguments: function(state.policy, *arguments)


def _decision(function: Callable[..., Any]) -> Callable[..., Any]:
    """The answer of `begin`, `check` or `proceed` with the state after it."""

    def decide(state: Any, *arguments: Any) -> Any:
        answer, inner = function(state.policy, *arguments)
        return answer, state._replace(policy=inner)

    return decide
