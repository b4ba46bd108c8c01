"""Checks of policies and verifiers of trees before compilation (see `decoding/answers.py`)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from specdec_jax.contrib.trees.seams import Children, Extras, SiblingOutcomes, TreeDraft, TreePolicy, TreeResult
from specdec_jax.decoding.answers import (
    Probe,
    Sizes,
    array,
    context_shapes,
    distribution_shapes,
    draft_shapes,
    result_shapes,
)
from specdec_jax.types import (
    Draft,
    Drafter,
    LanguageModel,
    MonitorState,
    PolicyState,
    RoundContext,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    VerifierState,
)


def max_tokens(policy: TreePolicy, max_draft_length: int) -> int:
    """Maximum tokens of a draft, including all siblings."""
    return max_draft_length * (1 + policy.siblings)


def needs_one_model(policy: TreePolicy) -> bool:
    """Whether the policy requires a drafter with a single language model, because passes expand siblings."""
    return policy.expanded > 0


def as_chain(policy: TreePolicy) -> StoppingPolicy:
    """The same policy without siblings, for rounds of chains; its `update` gets them as trees without siblings."""

    def update(state: PolicyState, draft: Draft, result: VerificationResult) -> PolicyState:
        none = jnp.zeros_like(draft.tokens)
        tree = TreeDraft(*draft, siblings=jnp.zeros((*none.shape, policy.siblings), jnp.int32), sibling_counts=none)
        learnt_from: Any = tree, TreeResult(*result, extra_tokens=jnp.zeros_like(result.length))
        return policy.update(state, *learnt_from)

    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(StoppingPolicy) if field.init}
    return StoppingPolicy(**{**fields, "update": update})


def shapes_of(policy: TreePolicy) -> str:
    """A description of the tested drafts, for a verdict."""
    return f"chains and up to {policy.siblings} siblings of a draft"


def check_parts(target: LanguageModel, drafter: Drafter, policy: TreePolicy, widths: Sequence[int]) -> None:
    """Raises ValueError for a policy whose siblings cannot be drawn or verified."""
    if not policy.siblings or policy.beside is None or bool(policy.expanded) != (policy.expand is not None):
        raise ValueError(
            f"{policy.name} must have siblings of 1 or more with `beside`, and `expand` as it has some expanded"
        )
    if not draws_siblings(drafter):
        raise ValueError(f"{policy.name} wants siblings of drafts, and {drafter.name} draws none")
    if not target.spec.by_position:
        raise ValueError(
            f"{policy.name} wants siblings of drafts, and this target cannot verify them: its attention goes by cache "
            "slots (sliding windows, ALiBi), it has an encoder, or its passes take no positions "
            "(`ModelSpec.by_position`)"
        )
    if policy.expanded and (drafter.model is None or not drafter.model.spec.by_position):
        raise ValueError(
            f"{policy.name} wants siblings expanded, and {drafter.name} cannot read several tokens at one position: "
            "that takes one language model of the target's vocabulary, whose attention goes by positions"
        )
    if policy.expanded > widths[-1]:  # the room of caches after a text
        raise ValueError(
            f"{policy.name} wants {policy.expanded} siblings a pass expanded, more than {widths[-1]}, "
            "the widest verification"
        )


def draws_siblings(drafter: Drafter) -> bool:
    """Whether the drafter draws tokens from distributions over the target's vocabulary; lookups have no siblings."""
    if drafter.call is not None and "drafters" in drafter.call.options:
        return any(map(draws_siblings, drafter.call.options["drafters"]))
    return drafter.model is not None and drafter.drafts_from_model


def check_answers(
    probe: Probe, policy: TreePolicy, sizes: Sizes, context: RoundContext, keep_log_q: bool
) -> tuple[TreeDraft, TreeResult]:
    """Checks the results of a policy's `beside` and `expand`; returns the shapes of the arguments of `update`.

    Raises:
        ValueError: names the function with its actual and required return value.
    """
    batch, expansions = sizes.batch, _expansions(policy, sizes)
    whole = array(jnp.int32, batch)
    parent = array(jnp.int32, batch, expansions) if expansions else None
    wanted = probe.result("beside", probe.state, whole, whole, context, parent)
    children = array(jnp.int32, batch, expansions) if expansions else getattr(wanted, "children", None)
    siblings = getattr(getattr(wanted, "siblings", None), "shape", (batch, 0))[1:2] or (0,)  # N is the policy's
    probe.must_be("beside", wanted, Extras(array(jnp.int32, batch, *siblings), children), loose=2)
    if policy.expand is not None:
        worth = probe.result("expand", probe.state, whole, context)
        drafts = getattr(worth, "shape", ())[1:2] or (1,)
        probe.must_be("expand", worth, array(jnp.float32, batch, *drafts, policy.siblings), loose=1)
    result = TreeResult(*result_shapes(sizes), whole)
    return _shapes(policy, sizes, sizes.max_draft_length, keep_log_q), result


def check_verifier(
    policy: TreePolicy, verifier: Verifier, state: VerifierState, sizes: Sizes, monitor: MonitorState, held: int
) -> None:
    """Checks the result of a verifier's `outcomes` for drafts of `held` tokens. Raises ValueError."""
    if getattr(verifier, "outcomes", None) is None or not held:
        return
    batch, vocab, siblings = sizes.batch, sizes.vocab_size, policy.siblings
    probe, draft = Probe.of("verifier", verifier, state, batch), _shapes(policy, sizes, held, verifier.needs_log_q)
    target = distribution_shapes(batch, vocab, held + 1)
    ends = probe.result("outcomes", draft, target, array(jnp.int32, batch), context_shapes(batch, monitor))
    chance, tokens = array(jnp.float32, batch, siblings + 1), array(jnp.int32, batch, siblings)
    wanted = SiblingOutcomes(chance, tokens, array(jnp.float32, batch, vocab))
    probe.must_be("outcomes", ends, wanted, loose=3)


def _expansions(policy: TreePolicy, sizes: Sizes) -> int:
    """Number of expanded siblings of a round: its first drafter pass expands none."""
    return policy.expanded * (sizes.max_draft_length - 1)


def _shapes(policy: TreePolicy, sizes: Sizes, held: int, keep_log_q: bool) -> TreeDraft:
    """The shapes of a draft of at most `held` tokens with its siblings and children."""
    whole, siblings, count = (
        functools.partial(array, jnp.int32, sizes.batch),
        policy.siblings,
        _expansions(policy, sizes),
    )
    children = None
    if count:
        log_q = array(jnp.float32, sizes.batch, count, sizes.vocab_size) if keep_log_q else None
        children = Children(whole(count), whole(count, siblings), log_q, whole(count))
    return TreeDraft(
        *draft_shapes(sizes._replace(max_draft_length=held), keep_log_q), whole(held, siblings), whole(held), children
    )
