"""Every hook that the core calls is there: a missing one is an error in the middle of a proof."""

import re
from pathlib import Path

import jax.numpy as jnp

import specdec_jax
from specdec_jax.contrib.trees import comb, hooks
from specdec_jax.types import Draft, VerificationResult


def test_the_core_calls_hooks_that_are_there():
    called = set()
    for path in Path(specdec_jax.__file__).parent.rglob("*.py"):
        if "contrib" not in path.parts:
            source = path.read_text(encoding="utf-8")
            called |= set(re.findall(r"\b(?:policy\.rounds|verifier\.rounds|of_trees)\.(\w+)\(", source))
            called |= set(re.findall(r"\brounds\.(\w+)\(setting", source))
    assert {"max_tokens", "prove_rounds", "enumerate_round", "end_round"} <= called
    assert [name for name in sorted(called) if not callable(getattr(hooks, name, None))] == []


def test_a_rule_of_trees_learns_from_a_chain_as_from_a_tree_without_siblings():
    """Its `update` may read what only trees have: proofs of chains must not take that away."""
    seen = []

    def update(state, draft, result):
        seen.append((draft.sibling_counts.sum(), result.extra_tokens.sum(), result.emitted.tolist()))
        return state

    tokens = jnp.zeros((2, 3), jnp.int32)
    draft = Draft(tokens, None, tokens > 0, jnp.array([3, 1]))
    result = VerificationResult(jnp.zeros((2, 4), jnp.int32), jnp.array([2, 1]))
    chain = hooks.as_chain(comb().replace(update=update))
    assert chain.rounds is None
    chain.update(chain.init(2), draft, result)
    assert seen == [(0, 0, [2, 1])]
