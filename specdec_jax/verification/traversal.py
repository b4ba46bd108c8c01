"""Traversal verification of a chain with siblings: from its leaves to its root (arXiv 2505.12398)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.siblings import normalised, without
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, SiblingOutcomes, Verifier
from specdec_jax.verification._common import at_position, draft_log_probabilities, no_hyperparameters, positions
from specdec_jax.verification.block import block, longest_yes, prefix_weights


class _Node(NamedTuple):
    """A prefix that the draft goes on after, before what follows it was tried; N of them."""

    p: Array  # [N, V], the target's distribution there
    q: Array  # [N, V], the drafter's
    weight: Array  # [N], w of block verification
    token: Array  # [N] int32, the draft's next
    siblings: Array  # [N, M] int32
    tried: Array  # [N, M] bool, which of them are verified
    is_sampled: Array  # [N] bool


@strategy
def traversal() -> Verifier:
    """Try the whole draft, then the siblings of its last token, then the draft without that, and so on to its root.

    A prefix has block verification's weight w. Where what follows it was rejected, the target's p and w become
    max(w p - q, 0) / Z and Z / (Z + 1 - w), with Z their sum; a sibling s, drawn from what is left of q, is then
    accepted with min(1, w p(s) / q(s)), or treated as what was rejected before it; the prefix itself at last with w.
    Lossless. Other verifiers first say where the chain ends, and try siblings there with what they have left: here the
    whole text that ends with a sibling is tried before shorter ones are. For chains alone it is `block`.
    """
    chain = block()

    def verify(
        state: tuple[()], draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, Callable[[Array], Array], tuple[()]]:
        lengths, next_distribution, state = chain.verify(state, draft, distributions, context)
        if draft.beside is None:
            return lengths, next_distribution, state
        nodes, weight = _nodes(draft, distributions, context)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), nodes)
        accepts, last, _ = _in_turn(flat)
        ends = (1.0 - jnp.prod(1.0 - accepts, axis=1) * (1.0 - last)).reshape(draft.tokens.shape)
        index, length = positions(weight.shape[1])[None, :], draft.length[:, None]
        ends = jnp.pad(ends, ((0, 0), (0, 1)))
        return longest_yes(jnp.where(index < length, ends, weight), draft.length), next_distribution, state

    def outcomes(draft: Draft, distributions: Distribution, accepted: Array, context: RoundContext) -> SiblingOutcomes:
        nodes, _ = _nodes(draft, distributions, context)
        at = jnp.minimum(accepted, draft.tokens.shape[1] - 1)
        here = lambda leaf: jnp.take_along_axis(leaf, at.reshape(-1, *[1] * (leaf.ndim - 1)), axis=1)[:, 0]  # noqa: E731
        node = jax.tree.map(here, nodes)
        accepts, last, rest = _in_turn(node)
        reach = jnp.cumprod(jnp.pad(1.0 - accepts, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
        chance = jnp.concatenate([(reach[:, -1] * last)[:, None], reach[:, :-1] * accepts], axis=1)
        none = jnp.zeros_like(chance).at[:, 0].set(1.0)
        inside = (accepted < draft.length)[:, None]
        whole = jnp.exp(at_position(distributions.log_prob, accepted))
        chance = jnp.where(inside & (jnp.sum(chance, axis=1, keepdims=True) > 0), normalised(chance), none)
        return SiblingOutcomes(chance, node.siblings, jnp.where(inside, rest, whole))

    return Verifier(no_hyperparameters, verify, lossless=True, outcomes=outcomes)


def _nodes(draft: Draft, distributions: Distribution, context: RoundContext) -> tuple[_Node, Array]:
    """The prefixes of 0 .. K-1 drafts, leaves [B, K, ...]; and the weights of all, [B, K+1]."""
    assert draft.siblings is not None and draft.beside is not None
    log_p = distributions.log_prob
    log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
    weight = prefix_weights(log_p_token - log_q_token)
    width, most = draft.siblings.shape[1:]
    tried = positions(most)[None, None, :] < draft.beside[:, :, None]
    is_sampled = jnp.broadcast_to((context.warp.temperature > 0)[:, None], draft.tokens.shape)
    p, q = jnp.exp(log_p[:, :width]), jnp.exp(log_q)
    return _Node(p, q, weight[:, :width], draft.tokens, draft.siblings, tried, is_sampled), weight


def _in_turn(node: _Node) -> tuple[Array, Array, Array]:
    """(chances of each sibling where those before it were rejected [N, M]; of the prefix itself [N]; its p [N, V])."""
    p, weight = _after_rejection(node.p, node.q, node.weight)
    left, accepts = without(node.q, node.token, 0.0), []
    for index in range(node.siblings.shape[1]):
        token = node.siblings[:, index]
        certain = without(jnp.zeros_like(p), token, 1.0)
        q = jnp.where(node.is_sampled[:, None], normalised(left), certain)
        p_token, q_token = (jnp.take_along_axis(values, token[:, None], axis=1)[:, 0] for values in (p, q))
        possible = node.tried[:, index] & (q_token > 0)
        ratio = weight * p_token / jnp.where(possible, q_token, 1.0)
        accepts.append(jnp.where(possible, jnp.minimum(1.0, ratio), 0.0))
        rest, lighter = _after_rejection(p, q, weight)
        p, weight = jnp.where(possible[:, None], rest, p), jnp.where(possible, lighter, weight)
        left = without(left, token, 0.0)
    return jnp.stack(accepts, axis=1), weight, p


def _after_rejection(p: Array, q: Array, weight: Array) -> tuple[Array, Array]:
    """What p [N, V] and the weight [N] become where a token drawn from q was rejected."""
    rest = jnp.maximum(weight[:, None] * p - q, 0.0)
    total = jnp.sum(rest, axis=1)
    slack = total + (1.0 - weight)  # 0: w = 1 and p = q, where nothing is rejected
    lighter = jnp.where(slack > 0, total / jnp.where(slack > 0, slack, 1.0), 1.0)
    return jnp.where((total > 0)[:, None], normalised(rest), p), lighter
