"""Traversal verification of a chain with siblings: from its leaves to its root (arXiv 2505.12398)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.contrib.trees.seams import SiblingOutcomes, TreeDraft, TreeVerifier
from specdec_jax.contrib.trees.siblings import accept_in_order, after_rejection, at_depth, by_candidate
from specdec_jax.decoding.sampling import normalised, without
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, RoundContext
from specdec_jax.verification._common import at_position, draft_log_probabilities, no_hyperparameters, positions
from specdec_jax.verification.block import block, longest_yes, prefix_weights


class _Node(NamedTuple):
    """A proper prefix of the draft, before the tokens after it are tested; N of them."""

    p: Array  # [N, V], the target's distribution after it
    q: Array  # [N, V], the drafter's
    weight: Array  # [N], w of block verification
    token: Array  # [N] int32, the draft's next token
    siblings: Array  # [N, M] int32
    tried: Array  # [N, M] bool, the verified ones
    is_sampled: Array  # [N] bool


@strategy
def traversal() -> TreeVerifier:
    """Test the whole draft, then the siblings of its last token, then the draft without that token, and so on.

    A prefix has block verification's weight w. After a rejection of its continuation, the target's p and w become
    max(w p - q, 0) / Z and Z / (Z + 1 - w), with Z the sum; a sibling s, drawn from the rest of q, is then accepted
    with probability min(1, w p(s) / q(s)), or treated like the rejected token before; finally the prefix itself with w.
    Lossless. Other verifiers first determine where the chain ends, and test siblings there with the residual; here the
    whole text ending with a sibling is tested before shorter ones. For chains it is equal to `block`.
    """
    chain = block()

    def verify(
        state: tuple[()], draft: TreeDraft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, Callable[[Array], Array], tuple[()]]:
        lengths, next_distribution, state = chain.verify(state, draft, distributions, context)  # type: ignore[arg-type]
        if not isinstance(draft, TreeDraft):  # a chain
            return lengths, next_distribution, state
        nodes, weight = _nodes(draft, distributions, context)
        accepts, last, _ = _accept_siblings(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), nodes))
        ends = (1.0 - jnp.prod(1.0 - accepts, axis=1) * (1.0 - last)).reshape(draft.tokens.shape)
        index, length = positions(weight.shape[1])[None, :], draft.length[:, None]
        ends = jnp.pad(ends, ((0, 0), (0, 1)))
        return longest_yes(jnp.where(index < length, ends, weight), draft.length), next_distribution, state

    def outcomes(
        draft: TreeDraft, distributions: Distribution, accepted: Array, context: RoundContext
    ) -> SiblingOutcomes:
        node = at_depth(_nodes(draft, distributions, context)[0], accepted)
        accepts, last, rest = _accept_siblings(node)
        chance = by_candidate(accepts, last)
        none = jnp.zeros_like(chance).at[:, 0].set(1.0)
        inside = (accepted < draft.length)[:, None]
        whole = jnp.exp(at_position(distributions.log_prob, accepted))
        chance = jnp.where(inside & (jnp.sum(chance, axis=1, keepdims=True) > 0), normalised(chance), none)
        return SiblingOutcomes(chance, node.siblings, jnp.where(inside, rest, whole))

    return TreeVerifier(no_hyperparameters, verify, lossless=True, outcomes=outcomes)  # type: ignore[arg-type]


def _nodes(draft: TreeDraft, distributions: Distribution, context: RoundContext) -> tuple[_Node, Array]:
    """The prefixes of 0 .. K-1 drafts, leaves [B, K, ...]; and the weights of all, [B, K+1]."""
    log_p = distributions.log_prob
    log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)  # type: ignore[arg-type]
    weight = prefix_weights(log_p_token - log_q_token)
    width, siblings = draft.siblings.shape[1:]
    tried = positions(siblings)[None, None, :] < draft.sibling_counts[:, :, None]
    is_sampled = jnp.broadcast_to((context.warp.temperature > 0)[:, None], draft.tokens.shape)
    p, q = jnp.exp(log_p[:, :width]), jnp.exp(log_q)
    return _Node(p, q, weight[:, :width], draft.tokens, draft.siblings, tried, is_sampled), weight


def _accept_siblings(node: _Node) -> tuple[Array, Array, Array]:
    """(acceptance probability of each sibling if earlier ones are rejected [N, M], of the prefix [N]; its p [N, V])."""
    p, weight = after_rejection(node.p, node.q, node.weight)
    left = without(node.q, node.token, 0.0)
    return accept_in_order(p, weight, left, node.siblings, node.tried, node.is_sampled)
