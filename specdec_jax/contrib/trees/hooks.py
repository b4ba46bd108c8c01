"""Functions that the decoder, proofs and replays call for policies and verifiers of trees (`tree_hooks`)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from specdec_jax.contrib.trees.rounds import decode_round
from specdec_jax.contrib.trees.seams import SiblingOutcomes, TreeDraft, TreePolicy, TreeResult
from specdec_jax.decoding import function_checks as checks
from specdec_jax.decoding.function_checks import Probe, Sizes, array
from specdec_jax.types import Drafter, LanguageModel, MonitorState, RoundContext, Verifier, VerifierState

FILES = {"prove_siblings": "enumeration", "ends_of_round": "enumeration", "end_round": "replaying"}  # imported on use


def __getattr__(name: str) -> Any:
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"specdec_jax.contrib.trees.{FILES[name]}"), name)


def round_of(target: LanguageModel, drafter: Drafter, policy: TreePolicy) -> Callable[..., Any]:
    """The function `decode_round`. Raises ValueError for a policy whose siblings cannot be drawn or verified."""
    if not policy.siblings or policy.beside is None:
        raise ValueError(f"{policy.name} must have siblings of 1 or more with `beside`")
    if not draws_siblings(drafter):
        raise ValueError(f"{policy.name} wants siblings of drafts, and {drafter.name} draws none")
    if not target.spec.by_position:
        raise ValueError(
            f"{policy.name} wants siblings of drafts, and this target cannot verify them: its attention goes by cache "
            "slots (sliding windows, ALiBi), it has an encoder, or its passes take no positions "
            "(`ModelSpec.by_position`)"
        )
    return decode_round


def draws_siblings(drafter: Drafter) -> bool:
    """Whether the drafter draws tokens from distributions over the target's vocabulary; lookups have no siblings."""
    from specdec_jax.contrib.retokenized.drafter import RetokenizedDrafter  # imports the library of tokenizers

    if drafter.call is not None and "drafters" in drafter.call.options:
        return any(map(draws_siblings, drafter.call.options["drafters"]))
    return drafter.model is not None and not isinstance(drafter, RetokenizedDrafter)


def check_answers(
    probe: Probe, policy: TreePolicy, sizes: Sizes, context: RoundContext, keep_log_q: bool
) -> tuple[TreeDraft, TreeResult]:
    """Checks the result of a policy's `beside`; returns the shapes of the arguments of `update`. Raises ValueError."""
    whole = array(jnp.int32, sizes.batch)
    wanted = probe.result("beside", probe.state, whole, whole, context)
    drafts = getattr(wanted, "shape", (sizes.batch, 0))[1:2] or (0,)  # N is the policy's
    probe.must_be("beside", wanted, array(jnp.int32, sizes.batch, *drafts), loose=1)
    return _shapes(policy, sizes, keep_log_q), TreeResult(*checks.result_shapes(sizes), whole)


def check_verifier(
    policy: TreePolicy, verifier: Verifier, state: VerifierState, sizes: Sizes, monitor: MonitorState
) -> None:
    """Checks the result of a verifier's `outcomes` for drafts of up to `sizes.max_draft_length`. Raises ValueError."""
    (batch, vocab, longest), siblings = sizes, policy.siblings
    if getattr(verifier, "outcomes", None) is None or not longest:
        return
    probe = Probe.of("verifier", verifier, state, batch)
    draft = _shapes(policy, sizes, verifier.needs_log_q)
    target = checks.distribution_shapes(batch, vocab, longest + 1)
    ends = probe.result("outcomes", draft, target, array(jnp.int32, batch), checks.context_shapes(batch, monitor))
    chance, tokens = array(jnp.float32, batch, siblings + 1), array(jnp.int32, batch, siblings)
    probe.must_be("outcomes", ends, SiblingOutcomes(chance, tokens, array(jnp.float32, batch, vocab)), loose=3)


def _shapes(policy: TreePolicy, sizes: Sizes, keep_log_q: bool) -> TreeDraft:
    """The shapes of a draft of at most `sizes.max_draft_length` tokens with its siblings."""
    counts = array(jnp.int32, sizes.batch, sizes.max_draft_length)
    siblings = array(jnp.int32, *counts.shape, policy.siblings)
    return TreeDraft(*checks.draft_shapes(sizes, keep_log_q), siblings, counts)
