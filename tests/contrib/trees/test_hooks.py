"""Every hook that the core calls is there: a missing one is an error in the middle of a proof."""

import re
from pathlib import Path

import specdec_jax
from specdec_jax.contrib.trees import hooks


def test_the_core_calls_hooks_that_are_there():
    called = set()
    for path in Path(specdec_jax.__file__).parent.rglob("*.py"):
        if "contrib" not in path.parts:
            source = path.read_text(encoding="utf-8")
            called |= set(re.findall(r"\b(?:policy\.rounds|verifier\.rounds|of_trees)\.(\w+)\(", source))
            called |= set(re.findall(r"\brounds\.(\w+)\(setting", source))
    assert {"max_tokens", "prove_rounds", "enumerate_round", "end_round"} <= called
    assert [name for name in sorted(called) if not callable(getattr(hooks, name, None))] == []
