"""Cached grouped-query attention with one key and one value buffer per layer, and the tables of its weights."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import kernels
from specdec_jax.models.layers import Projection, in_table, is_lone, out_table, soft_cap
from specdec_jax.models.rope import rotate
from specdec_jax.models.weights import Fused, Parameter
from specdec_jax.types import Array

LONG = 128  # passes of at least this many tokens (prompts) use `attend_by_blocks`
KEY_BLOCK = 256  # keys per block
QKV = slice(-2), -2, -1  # indices of the queries, the key and the value among a group's parts (`fused_heads`)


class KVCache(NamedTuple):
    """One key and one value buffer per layer: a stack over layers would be copied by every pass (measured, 36 MiB)."""

    keys: tuple[Array, ...]  # L times [B, Hkv, S, head_dim]
    values: tuple[Array, ...]  # L times [B, Hkv, S, head_dim]
    length: Array  # [B] int32, number of valid slots; the others are never read


def init_kv_cache(layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any) -> KVCache:
    """An empty cache of `slots` tokens per row."""

    def buffers():  # distinct arrays: a buffer used twice cannot be donated
        return tuple(jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(layers))

    return KVCache(buffers(), buffers(), jnp.zeros((batch,), jnp.int32))


def with_length(cache: Any, length: Array) -> Any:
    """Rollback (or roll forward over valid entries) of any NamedTuple cache: only its field `length` [B] changes."""
    return cache._replace(length=length.astype(jnp.int32))


def write(buffer: Array, new: Array, start: Array) -> Array:
    """Writes new [B, Hkv, T, head_dim] to slots start[b] ... start[b] + T - 1 of buffer [B, Hkv, S, head_dim].

    The caller guarantees start + T <= S: `dynamic_update_slice` clamps and would overwrite valid entries. The rows are
    written by a batched scatter, not a loop of slices: it takes the same time, the program does not grow with B, and
    devices that share the rows need no communication. The barrier keeps XLA from fusing the write into its readers,
    which would copy the cache in every pass with T = 1 (temporary memory of 1.3 caches, 0.01 with the barrier).
    """
    zero, new = jnp.zeros((), jnp.int32), new.astype(buffer.dtype)
    if buffer.shape[0] == 1:
        return lax.optimization_barrier(lax.dynamic_update_slice(buffer, new, (zero, zero, start[0], zero)))

    def row(buffer: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(buffer, new, (zero, start, zero))

    return lax.optimization_barrier(jax.vmap(row)(buffer, new, start))


def causal_mask(start: Array, width: int, slots: int, mask: Array | None, window: int | None = None) -> Array:
    """[B, T, S] bool: a query at slot start[b] + t sees the slots up to its own that are in `mask`.

    With a window it sees the last `window` of them, including its own. The mask is by slot, not by position, so that
    nodes of a tree (several slots at one position) only need a mask of their ancestors.
    """
    query = start[:, None, None] + jnp.arange(width)[None, :, None]
    slot = jnp.arange(slots)[None, None, :]
    causal = slot <= query if window is None else (slot <= query) & (slot > query - window)
    return causal if mask is None else causal & mask


class Scoring(NamedTuple):
    """How products of queries and keys become scores, before the softmax."""

    scale: float | None = None  # factor of queries; None: head_dim ** -0.5
    cap: float | None = None  # `layers.soft_cap`
    bias: Callable[[Array], Array] | None = None  # distances key slot - query slot [B, T, S] int32 -> biases
    # [B, H, T, S]

    def scaled(self, query: Array) -> Array:
        """Scaled queries [..., head_dim]."""
        return query * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def scores(self, product: Array, width: int, start: Array, first: Array | int = 0) -> Array:
        """Scores of products [B, Hkv, G T, S]: T queries from slot start [B], keys from slot `first`."""
        product, biases = soft_cap(product, self.cap), self.biases(width, start, product.shape[-1], first)
        return product if biases is None else product + biases.reshape(product.shape)

    def biases(self, width: int, start: Array, slots: int, first: Array | int = 0) -> Array | None:
        """Biases [B, H, T, S] of the scores, with slots as in `scores`; None: no biases."""
        if self.bias is None:
            return None
        query = start[:, None, None] + jnp.arange(width, dtype=jnp.int32)[None, :, None]
        key = first + jnp.arange(slots, dtype=jnp.int32)[None, None, :]
        return self.bias(key - query)


PLAIN = Scoring()


def alibi(slopes: tuple[float, ...], distance: Array) -> Array:
    """Linear biases (ALiBi, arXiv 2108.12409, section 3): distances [B, T, S] times a slope per head, [B, H, T, S]."""
    return jnp.asarray(slopes, jnp.float32)[None, :, None, None] * distance[:, None].astype(jnp.float32)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n) ... for n a power of two; otherwise the rest are every second slope of the next power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(alibi_slopes(2 * power)[0::2][: heads - power] if heads > power else ()))


def attend(query: Array, keys: Array, values: Array, mask: Array, start: Array, scoring: Scoring = PLAIN) -> Array:
    """Grouped-query attention of query [B, T, H, head_dim] over keys and values [B, Hkv, S, head_dim], mask [B, T, S].

    On a CPU by a native kernel (`kernels`), whose result for a row does not depend on the rest of the pass.
    """
    scaled, biases = scoring.scaled(query).astype(keys.dtype), scoring.biases(query.shape[1], start, keys.shape[2])
    operands = (scaled, keys, values, mask) if biases is None else (scaled, keys, values, mask, biases)
    by_xla = functools.partial(_attend_by_xla, scoring.cap)
    if kernels.serve_attention(scaled, keys):
        return kernels.attention(by_xla, scoring.cap or 0.0, *operands)
    return by_xla(*operands)


def _attend_by_xla(
    cap: float | None, query: Array, keys: Array, values: Array, mask: Array, biases: Array | None = None
) -> Array:
    """`attend` with scaled queries and biases of scores [B, H, T, S].

    The G query heads of a group and the T tokens are the rows of one product with their key head: repeating keys would
    copy the cache, and with separate axes for G and T XLA folds the transpose of the result into the product, which its
    CPU runtime does not support in bfloat16 ("Unsupported element type for DotThunk", jax 0.12, B and Hkv above 1).
    """
    batch, width, heads, head_dim = query.shape
    kv_heads, group, dtype = keys.shape[1], heads // keys.shape[1], keys.dtype
    if is_lone(group * width, dtype):
        query, mask = jnp.concatenate([query] * 2, axis=1), jnp.concatenate([mask] * 2, axis=1)
        biases = None if biases is None else jnp.concatenate([biases] * 2, axis=2)
        return _attend_by_xla(cap, query, keys, values, mask, biases)[:, :1]
    query = query.reshape(batch, width, kv_heads, group, head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * width, head_dim)
    score = jnp.einsum("bkmd,bksd->bkms", query, keys, preferred_element_type=jnp.float32)
    score = soft_cap(score, cap).reshape(batch, kv_heads, group, width, -1)
    score = score if biases is None else score + biases.reshape(score.shape)
    score = jnp.where(mask[:, None, None, :, :], score, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(score, axis=-1).astype(dtype).reshape(batch, kv_heads, group * width, -1)
    out = jnp.einsum("bkms,bksd->bkmd", weight, values, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, group, width, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, width, heads * head_dim)


def attend_by_blocks(
    query: Array, keys: Array, values: Array, mask: Array, start: Array, scoring: Scoring, block: int = KEY_BLOCK
) -> Array:
    """`attend` for long prompts: keys block by block, up to the last slot that any row has filled.

    The running maximum and sum of the softmax are those of FlashAttention (arXiv 2205.14135, section 3.1). This skips
    half of the keys of a prompt, and a block's weights stay in the processor's cache.
    """
    batch, width, heads, head_dim = query.shape
    kv_heads, slots, dtype = keys.shape[1], keys.shape[2], keys.dtype
    group, block = heads // kv_heads, min(block, slots)
    query = scoring.scaled(query).astype(dtype).reshape(batch, width, kv_heads, group, head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * width, head_dim)
    seen = jnp.max(start) + width

    def one_block(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        index, top, total, out = carry
        begin = jnp.minimum(index * block, slots - block)  # the last block's overlap with the one before is masked
        key, value = (lax.dynamic_slice_in_dim(buffer, begin, block, axis=2) for buffer in (keys, values))
        new = (begin + jnp.arange(block, dtype=jnp.int32) >= index * block)[None, None, :]
        visible = lax.dynamic_slice_in_dim(mask, begin, block, axis=2) & new
        visible = jnp.tile(visible[:, None], (1, 1, group, 1))  # rows of a group's heads, head by head
        score = jnp.einsum("bkmd,bksd->bkms", query, key, preferred_element_type=jnp.float32)
        score = jnp.where(visible, scoring.scores(score, width, start, begin), jnp.finfo(jnp.float32).min)
        higher = jnp.maximum(top, jnp.max(score, axis=-1))
        weight, fade = jnp.where(visible, jnp.exp(score - higher[..., None]), 0.0), jnp.exp(top - higher)
        added = jnp.einsum("bkms,bksd->bkmd", weight.astype(dtype), value, preferred_element_type=jnp.float32)
        return index + 1, higher, total * fade + jnp.sum(weight, axis=-1), out * fade[..., None] + added

    row = (batch, kv_heads, group * width)
    nothing = jnp.full(row, jnp.finfo(jnp.float32).min), jnp.zeros(row), jnp.zeros((*row, head_dim))
    begin = (jnp.zeros((), jnp.int32), *nothing)
    _, _, total, out = lax.while_loop(lambda carry: carry[0] * block < seen, one_block, begin)
    out = (out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).reshape(
        batch, kv_heads, group, width, head_dim
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * head_dim)


def attend_whole(query: Array, keys: Array, values: Array, mask: Array, scoring: Scoring = PLAIN) -> Array:
    """`attend` for whole texts from slot 0, in training.

    One row at a time, with the weights recomputed for the gradient: the weights of all rows (B H T S float32) would
    pass through memory five times, those of one row stay in the processor's cache.
    """
    group = query.shape[2] // keys.shape[1]

    @jax.checkpoint
    def row(query: Array, keys: Array, values: Array, mask: Array) -> Array:
        keys, values = jnp.repeat(keys, group, axis=0), jnp.repeat(values, group, axis=0)
        score = jnp.einsum("thd,hsd->hts", scoring.scaled(query), keys)
        score = scoring.scores(score[None], query.shape[0], jnp.zeros((1,), jnp.int32))[0]
        score = jnp.where(mask[None], score, jnp.finfo(jnp.float32).min)
        return jnp.einsum("hts,hsd->thd", jax.nn.softmax(score, axis=-1), values)

    out = lax.map(lambda each: row(*each), (query, keys, values, mask))
    return out.reshape(*query.shape[:2], -1)


def fused_heads(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """[Hkv, G + 2, head_dim], the layout of the rows of a fused projection: per group G query heads, key, value.

    Ordered by group and not by kind, so that devices that share the groups need no communication. The kernel itself has
    two axes: XLA would transpose one with more in every pass (40 ms for SmolLM2 on a CPU).
    """
    return kv_heads, heads // kv_heads + 2, head_dim


def split_heads(fused: Array, heads: tuple[int, int, int]) -> tuple[Array, Array, Array]:
    """Fused [B, T, F] as query [B, T, H, head_dim], key and value [B, T, Hkv, head_dim]; `heads` by `fused_heads`."""
    group = heads[1] - 2
    parts = jnp.split(fused.reshape(*fused.shape[:2], *heads), [group, group + 1], axis=3)
    query, key, value = (part.reshape(*fused.shape[:2], -1, heads[-1]) for part in parts)
    return query, key, value


def split_rotated(fused: Array, heads: tuple[int, int, int], cos_sin: tuple[Array, Array]) -> tuple[Array, ...]:
    """`split_heads` with queries and keys rotated; elsewhere than on a CPU before the split, by fewer operations."""

    def apart(fused: Array, cos_sin: tuple[Array, Array]) -> tuple[Array, ...]:
        query, key, value = split_heads(fused, heads)
        return rotate(query, cos_sin), rotate(key, cos_sin), value

    def together(fused: Array, cos_sin: tuple[Array, Array]) -> tuple[Array, ...]:
        parts, (cos, sin) = fused.reshape(*fused.shape[:2], *heads), cos_sin
        cos, sin = (each.reshape(*each.shape[:2], 1, 1, -1) for each in (cos, sin))
        first, second = jnp.split(parts, 2, axis=-1)
        rotated = parts * cos - jnp.concatenate([second, first], axis=-1) * sin
        is_value = jnp.arange(heads[1], dtype=jnp.int32)[:, None] == heads[1] - 1
        return split_heads(jnp.where(is_value, parts, rotated).reshape(fused.shape), heads)

    if 2 * cos_sin[0].shape[-1] < heads[-1]:  # only a head's first part is rotated
        return apart(fused, cos_sin)
    with jax.named_scope("by_platform"):
        return lax.platform_dependent(fused, cos_sin, cpu=apart, default=together)


class Attention(nn.Module):
    """Cached self-attention with a fused projection of q, k and v (`fused_heads`); rotary if cos and sin are given.

    With a `norm` queries and keys are normalised per head, before the rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    dtype: Any
    norm: Callable[..., nn.Module] | None = None  # (name=)
    scoring: Scoring = PLAIN

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        """x [B, T, D] -> (out [B, T, D], keys, values), with this pass's tokens written from slot start [B].

        Without buffers (None) attention is over the pass's own keys and values, which are not kept.
        """
        width, model_width = x.shape[1:]
        heads = fused_heads(self.heads, self.kv_heads, self.head_dim)
        fused = Projection(math.prod(heads), self.qkv_bias, self.dtype, name="qkv")(x)
        if self.norm is None and cos_sin is not None:
            query, key, value = split_rotated(fused, heads, cos_sin)
        else:
            query, key, value = split_heads(fused, heads)
            if self.norm is not None:
                query, key = self.norm(name="query_norm")(query), self.norm(name="key_norm")(key)
            if cos_sin is not None:
                query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        output = Projection(model_width, self.output_bias, self.dtype, name="output")
        if keys is None:
            return output(attend_whole(query, key, value, mask, self.scoring)), None, None
        keys, values = write(keys, key, start), write(values, value, start)
        attended = (attend_by_blocks if width >= LONG else attend)(query, keys, values, mask, start, self.scoring)
        return output(attended), keys, values


def attention_table(
    names: Sequence[str],
    path: tuple[str, ...],
    heads: tuple[int, int, int],
    width: int,
    biases: tuple[bool, bool] = (False, False),
    by_kind: bool = False,
    turned: bool = False,
) -> dict[str, Parameter]:
    """The weights of `Attention`: Hugging Face's names, and their places below `path`.

    `names` are those of q, k, v and the output, or of a fused tensor for q, k and v and of the output. The rows of the
    fused tensor are ordered by group, as here (`fused_heads`); with `by_kind` all queries, all keys, all values.
    `heads` are H, Hkv and head_dim; `biases`: whether q, k and v have biases, and whether the output has one.
    """
    (count, kv_heads, head_dim), (*inputs, output) = heads, names
    rows = fused_heads(*heads)
    if len(inputs) == 1:
        parts = [(math.prod(rows), Fused(rows, QKV) if by_kind else None)]
    else:
        sizes = (count * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        parts = [(size, Fused(rows, (part,))) for size, part in zip(sizes, QKV, strict=True)]
    table: dict[str, Parameter] = {}
    for name, (size, fused) in zip(inputs, parts, strict=True):
        table |= in_table(name, (*path, "qkv"), (size, width), kv_heads, biases[0], fused, turned)
    return table | out_table(output, (*path, "output"), (width, count * head_dim), kv_heads, biases[1], turned)
