"""The loss over a vocabulary in chunks of positions, with the gradient computed in the forward pass.

The logits of a whole batch (7,168 positions of 49,152 float32 are 1.4 GB) are never created: those of a chunk fit in
the cache, and its gradient is computed from them at once, so that nothing is recomputed or stored for a backward pass.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.sampling import pick
from specdec_jax.distillation.losses import Loss, acceptance, coarse_distributions
from specdec_jax.models.layers import soft_cap
from specdec_jax.types import Array


class Labels(NamedTuple):
    """The labels for the loss of N positions. Indices are into the C candidates."""

    weight: Any  # [N] float32
    following: Any  # [N] int32, the next token of the text
    top: Any  # [N, k] int32; None: `log_prob` holds the target's logits of all candidates
    log_prob: Any  # [N, k] float32; logits [N, C] if `top` is None


class Sums(NamedTuple):
    """Weighted sums over positions; divide by `weight` for means."""

    loss: Array
    weight: Array
    agreement: Array  # the drafter's most probable candidate is the target's
    acceptance: Array  # sum of min(p, q) over the labels and the rest (or all candidates), at temperature 1
    surprise: Array  # nats, of the next token of the text


def build_head_loss(
    loss: Loss, *, chunk: int, dtype: Any, axis: str | None = None, cap: float | None = None
) -> Callable[..., tuple[Array, Sums]]:
    """`(hidden [N, D], embedding [C, D], correction [C], labels) -> (mean loss, sums)`.

    `correction` is added to the capped logits (`layers.soft_cap`), because sampled candidates represent others. Memory
    holds the logits of `chunk` positions, or fewer if N is not a multiple. Matrix products use `dtype` and sum in
    float32, also in the gradient. With an `axis` of devices N are the positions of each device, and losses and
    gradients sum to those of the mean.
    """

    def of_chunk(hidden, embedding, correction, labels: Labels):
        logits = soft_cap(_product(dtype, hidden, embedding), cap) + correction[None, :]
        log_q = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if labels.top is None:
            distributions = jax.nn.log_softmax(labels.log_prob, axis=-1), log_q
        else:
            distributions = coarse_distributions(labels.log_prob, jnp.take_along_axis(log_q, labels.top, axis=1))
        value = jnp.sum(loss(*distributions) * labels.weight)
        return value, lax.stop_gradient(_sums(value, log_q, distributions, labels))

    def scanned(hidden, embedding, correction, labels: Labels):
        size = math.gcd(chunk, hidden.shape[0])

        def cut(array: Array) -> Array:
            return array.reshape(-1, size, *array.shape[1:])

        def body(total, part):
            gradient = jax.value_and_grad(of_chunk, argnums=(0, 1), has_aux=True)
            (_, sums), (to_hidden, to_embedding) = gradient(part[0], embedding, correction, part[1])
            return jax.tree.map(jnp.add, total, (to_embedding, sums)), to_hidden

        start = (jnp.zeros_like(embedding), Sums(*jnp.zeros(len(Sums._fields), jnp.float32)))
        (to_embedding, sums), to_hidden = lax.scan(body, start, (cut(hidden), jax.tree.map(cut, labels)))
        scale = 1.0 / jnp.maximum(sums.weight if axis is None else lax.psum(sums.weight, axis), 1e-6)
        return (sums.loss * scale, sums), (to_hidden.reshape(hidden.shape) * scale, to_embedding * scale)

    @jax.custom_vjp
    def head_loss(hidden, embedding, correction, labels):
        return scanned(hidden, embedding, correction, labels)[0]

    def backward(gradients, cotangent):
        to_hidden, to_embedding = gradients
        return to_hidden * cotangent[0], to_embedding * cotangent[0], None, None

    head_loss.defvjp(scanned, backward)
    return head_loss


def _sums(value: Array, log_q: Array, distributions: tuple[Array, Array], labels: Labels) -> Sums:
    weight = labels.weight
    first = jnp.argmax(labels.log_prob, axis=-1) if labels.top is None else labels.top[:, 0]
    best = (jnp.argmax(log_q, axis=-1) == first).astype(jnp.float32)
    accepted = acceptance(*distributions)
    surprise = -pick(log_q, labels.following)
    return Sums(value, jnp.sum(weight), jnp.sum(best * weight), jnp.sum(accepted * weight), jnp.sum(surprise * weight))


def _dot(dtype: Any, left: Array, right: Array, axes: tuple[int, int]) -> Array:
    left, right = left.astype(dtype), right.astype(dtype)
    return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _bf16_product(hidden: Array, embedding: Array) -> Array:
    return _dot(jnp.bfloat16, hidden, embedding, (1, 1))


def _backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    hidden, embedding = residuals
    to_hidden = _dot(jnp.bfloat16, gradient, embedding, (1, 0))
    return to_hidden, _dot(jnp.bfloat16, gradient, hidden, (0, 0))


_bf16_product.defvjp(lambda hidden, embedding: (_bf16_product(hidden, embedding), (hidden, embedding)), _backward)


def _product(dtype: Any, hidden: Array, embedding: Array) -> Array:
    """hidden [N, D] times embedding [C, D], with a custom gradient: otherwise its products would be in float32, which
    take twice as long on a CPU."""
    if dtype == jnp.bfloat16:
        return _bf16_product(hidden, embedding)
    return _dot(dtype, hidden, embedding, (1, 1))
