"""Policies that wrap other policies and delegate all functions that they do not replace."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from specdec_jax.strategy import defaults_of
from specdec_jax.types import StoppingPolicy


def wrapped(policy: StoppingPolicy, **functions: Any) -> StoppingPolicy:
    """`policy` with some functions replaced, for a wrapper whose state holds the wrapped policy's state as `policy`.

    All other functions, including those that a subclass adds, are the wrapped policy's, applied to that part of the
    state. A further `init` has the hyperparameters of both.

    Raises:
        ValueError: both have a hyperparameter of one name.
    """
    if "init" in functions:
        mine, name = defaults_of(functions["init"]), functions["init"].__qualname__.partition(".")[0]
        if both := " and ".join(sorted(mine.keys() & policy.hyperparameters.keys())):
            raise ValueError(f"{name} needs a policy without hyperparameters called {both}, such as one not wrapped")
        functions = {"hyperparameters": {**policy.hyperparameters, **mine}, **functions}

    def of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda state, *arguments: function(state.policy, *arguments))

    def decision(function: Callable[..., Any]) -> Callable[..., Any]:
        def decide(state: Any, *arguments: Any) -> Any:
            answer, inner = function(state.policy, *arguments)
            return answer, state._replace(policy=inner)

        return decide

    more = {field.name for field in fields(policy)} - {field.name for field in fields(StoppingPolicy)}
    answers = {name: getattr(policy, name) for name in ("threshold", *more)}
    inner = {name: of_inner(function) for name, function in answers.items() if callable(function)}
    inner |= {name: decision(getattr(policy, name)) for name in ("begin", "check", "proceed")}

    def update(state: Any, *arguments: Any) -> Any:
        return state._replace(policy=policy.update(state.policy, *arguments))

    return policy.replace(**{**inner, "update": update, **functions})


def threshold_only(policy: StoppingPolicy) -> StoppingPolicy:
    """`policy` with a constant threshold: its only hyperparameter, the others keep their defaults."""
    return policy.replace(hyperparameters={"threshold": policy.hyperparameters["threshold"]})
