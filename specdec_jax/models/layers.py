"""What decoder families share: projection, norm, cached grouped-query attention, gated MLP.

Activations and the residual stream are float32; only what enters a matmul is rounded to `dtype`. Weights are [out, in],
Hugging Face's own layout: it needs no transpose at loading, and in bfloat16 on CPU it is twice as fast as [in, out].
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.models.rope import rotate
from specdec_jax.models.weights import Fused, Parameter

Array = jax.Array

LONG = 128  # tokens of a pass from which on attention goes by blocks: prompts
KEY_BLOCK = 256  # keys
MOST_BLOCKS, NARROW, TILE = 16, 2048, 128  # of a gated projection; columns
ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
WEIGHT_INIT = nn.initializers.normal(0.02)


class KVCache(NamedTuple):
    """One key and one value buffer a layer: a stack over layers is copied by every pass (36 MiB, measured)."""

    keys: tuple[Array, ...]  # L times [B, Hkv, S, head_dim]
    values: tuple[Array, ...]  # L times [B, Hkv, S, head_dim]
    length: Array  # [B] int32, slots that count; what lies beyond is garbage and never read


def init_kv_cache(layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any) -> KVCache:
    """An empty cache of `slots` tokens a row."""

    def buffers():  # distinct arrays: a buffer used twice cannot be donated
        return tuple(jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(layers))

    return KVCache(buffers(), buffers(), jnp.zeros((batch,), jnp.int32))


def with_length(cache: KVCache, length: Array) -> KVCache:
    """Rollback (or, over entries known to be good, roll forward): only the length [B] changes."""
    return cache._replace(length=length.astype(jnp.int32))


def write(buffer: Array, new: Array, start: Array) -> Array:
    """Puts new [B, Hkv, T, head_dim] into slots start[b] ... start[b] + T - 1 of buffer [B, Hkv, S, head_dim].

    The caller guarantees start + T <= S: `dynamic_update_slice` clamps and would overwrite good entries. Rows are one
    scatter that says so, not a loop of slices: same time, a program that does not grow with B, and devices that share
    the rows need nothing of each other. The barrier keeps XLA from fusing the write into each of its readers, which at
    T = 1 copies the cache every pass (1.3 caches of temporary memory, 0.01 with it).
    """
    zero, new = jnp.zeros((), jnp.int32), new.astype(buffer.dtype)
    if buffer.shape[0] == 1:
        return lax.optimization_barrier(lax.dynamic_update_slice(buffer, new, (zero, zero, start[0], zero)))

    def row(buffer: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(buffer, new, (zero, start, zero))

    return lax.optimization_barrier(jax.vmap(row)(buffer, new, start))


def is_lone(rows: int, dtype: Any) -> bool:
    """Whether a product of so many rows is doubled: a single row below float32 takes XLA's matrix-vector path on CPU,
    ten times slower than two rows, which also converts the whole matrix to float32 first."""
    return rows == 1 and jnp.finfo(dtype).bits < 32


def project(x: Array, kernel: Array, dtype: Any) -> Array:
    """x [..., D] times kernel [F, D] -> [..., F] float32, rounded to `dtype` before the product, summed in float32."""
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    lone = is_lone(x.size // x.shape[-1], dtype)
    if lone:
        x = jnp.concatenate([x, x], axis=-2)
    out = lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out[..., :1, :] if lone else out


class Projection(nn.Module):
    """A linear layer [..., D] -> [..., features] float32, kernel [features, D]."""

    features: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", WEIGHT_INIT, (self.features, x.shape[-1]), self.dtype)
        out = project(x, kernel, self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
            out += bias.astype(jnp.float32).reshape((1,) * (out.ndim - 1) + (-1,))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) in float32."""

    eps: float
    dtype: Any  # of the stored scale

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype).astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class LayerNorm(nn.Module):
    """Layer norm (arXiv 1607.06450) in float32, with scale and shift."""

    eps: float
    dtype: Any  # of the stored numbers

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (1,) * (x.ndim - 1) + (-1,)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.dtype).astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * scale.reshape(shape) + bias.reshape(shape)


def attend(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """Grouped-query attention of query [B, T, H, head_dim] over keys and values [B, Hkv, S, head_dim], mask [B, T, S].

    The G query heads of a group and the T tokens are the rows of one product with their key head: repeating keys would
    copy the cache, and with G and T apart XLA folds the transpose of the result into the product, which its CPU
    runtime then refuses in bfloat16 ("Unsupported element type for DotThunk", jax 0.12, B and Hkv above 1).
    """
    batch, width, heads, head_dim = query.shape
    kv_heads, group, dtype = keys.shape[1], heads // keys.shape[1], keys.dtype
    if is_lone(group * width, dtype):
        return attend(jnp.concatenate([query] * 2, axis=1), keys, values, jnp.concatenate([mask] * 2, axis=1))[:, :1]
    query = (query * head_dim**-0.5).astype(dtype).reshape(batch, width, kv_heads, group, head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * width, head_dim)
    score = jnp.einsum("bkmd,bksd->bkms", query, keys, preferred_element_type=jnp.float32)
    score = score.reshape(batch, kv_heads, group, width, -1)
    score = jnp.where(mask[:, None, None, :, :], score, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(score, axis=-1).astype(dtype).reshape(batch, kv_heads, group * width, -1)
    out = jnp.einsum("bkms,bksd->bkmd", weight, values, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, group, width, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, width, heads * head_dim)


def attend_by_blocks(
    query: Array, keys: Array, values: Array, mask: Array, seen: Array, block: int = KEY_BLOCK
) -> Array:
    """`attend` for long prompts: keys block by block, up to the `seen` slots (a scalar) that are filled by now.

    The running maximum and sum of the softmax are those of FlashAttention (arXiv 2205.14135, section 3.1). Half of the
    keys of a prompt are never looked at, and a block's weights stay in the processor's cache.
    """
    batch, width, heads, head_dim = query.shape
    kv_heads, slots, dtype = keys.shape[1], keys.shape[2], keys.dtype
    group, block = heads // kv_heads, min(block, slots)
    query = (query * head_dim**-0.5).astype(dtype).reshape(batch, width, kv_heads, group, head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * width, head_dim)

    def one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        index, top, total, out = carry
        begin = jnp.minimum(index * block, slots - block)  # of the last, what is there twice is masked
        key, value = (lax.dynamic_slice_in_dim(buffer, begin, block, axis=2) for buffer in (keys, values))
        new = (begin + jnp.arange(block, dtype=jnp.int32) >= index * block)[None, None, :]
        visible = lax.dynamic_slice_in_dim(mask, begin, block, axis=2) & new
        visible = jnp.tile(visible[:, None], (1, 1, group, 1))  # rows of a group's heads, one head after the other
        score = jnp.einsum("bkmd,bksd->bkms", query, key, preferred_element_type=jnp.float32)
        score = jnp.where(visible, score, jnp.finfo(jnp.float32).min)
        higher = jnp.maximum(top, jnp.max(score, axis=-1))
        weight, fade = jnp.where(visible, jnp.exp(score - higher[..., None]), 0.0), jnp.exp(top - higher)
        added = jnp.einsum("bkms,bksd->bkmd", weight.astype(dtype), value, preferred_element_type=jnp.float32)
        return index + 1, higher, total * fade + jnp.sum(weight, axis=-1), out * fade[..., None] + added

    row = (batch, kv_heads, group * width)
    nothing = jnp.full(row, jnp.finfo(jnp.float32).min), jnp.zeros(row), jnp.zeros((*row, head_dim))
    begin = (jnp.zeros((), jnp.int32), *nothing)
    _, _, total, out = lax.while_loop(lambda carry: carry[0] * block < seen, one, begin)
    out = (out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).reshape(
        batch, kv_heads, group, width, head_dim
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * head_dim)


def attend_whole(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """`attend` for whole texts in training: a row at a time, its weights computed again for the gradient.

    The weights of all rows at once (B H T S float32) pass through memory five times; a row's stay in the cache.
    """
    group = query.shape[2] // keys.shape[1]

    @jax.checkpoint
    def row(query: Array, keys: Array, values: Array, mask: Array) -> Array:
        keys, values = jnp.repeat(keys, group, axis=0), jnp.repeat(values, group, axis=0)
        score = jnp.einsum("thd,hsd->hts", query * query.shape[-1] ** -0.5, keys)
        score = jnp.where(mask[None], score, jnp.finfo(jnp.float32).min)
        return jnp.einsum("hts,hsd->thd", jax.nn.softmax(score, axis=-1), values)

    out = lax.map(lambda one: row(*one), (query, keys, values, mask))
    return out.reshape(*query.shape[:2], -1)


def fused_heads(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """[Hkv, G + 2, head_dim], how the rows of a fused projection lie: a group's G query heads, its key, its value.

    By group and not by kind: a device that has some of the groups needs nothing of the others. The kernel itself has
    two axes: XLA turns one of more around in every pass (40 ms for SmolLM2 on a CPU).
    """
    return kv_heads, heads // kv_heads + 2, head_dim


def split_heads(fused: Array, heads: tuple[int, int, int]) -> tuple[Array, Array, Array]:
    """Fused [B, T, F] as query [B, T, H, head_dim], key and value [B, T, Hkv, head_dim]; `heads` by `fused_heads`."""
    group = heads[1] - 2
    parts = jnp.split(fused.reshape(*fused.shape[:2], *heads), [group, group + 1], axis=3)
    query, key, value = (part.reshape(*fused.shape[:2], -1, heads[-1]) for part in parts)
    return query, key, value


class Attention(nn.Module):
    """Cached self-attention with rotary positions; q, k and v are one fused projection (`fused_heads`).

    With `norm_eps` queries and keys are normed head by head, before they are rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    dtype: Any
    norm_eps: float | None = None

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        """x [B, T, D] -> (out [B, T, D], keys, values), this pass's tokens written from slot start [B] on.

        Without buffers (None) the pass's own keys and values are all there is, and nothing is kept.
        """
        width, model_width = x.shape[1:]
        heads = fused_heads(self.heads, self.kv_heads, self.head_dim)
        fused = Projection(math.prod(heads), self.qkv_bias, self.dtype, name="qkv")(x)
        query, key, value = split_heads(fused, heads)
        if self.norm_eps is not None:
            query = RMSNorm(self.norm_eps, self.dtype, name="query_norm")(query)
            key = RMSNorm(self.norm_eps, self.dtype, name="key_norm")(key)
        key, value = rotate(key, cos_sin).swapaxes(1, 2), value.swapaxes(1, 2)
        output = Projection(model_width, self.output_bias, self.dtype, name="output")
        if keys is None:
            return output(attend_whole(rotate(query, cos_sin), key, value, mask)), None, None
        keys, values = write(keys, key, start), write(values, value, start)
        query = rotate(query, cos_sin)
        if width >= LONG:
            return output(attend_by_blocks(query, keys, values, mask, jnp.max(start) + width)), keys, values
        return output(attend(query, keys, values, mask)), keys, values


def fused_gates(hidden: int) -> tuple[int, int, int]:
    """[N, 2, F / N], how the rows of a fused projection lie: N blocks, of each the gate, then up.

    N is up to 16, as many devices as can share it, each a contiguous part. A narrow one that fills whole tiles of a TPU
    is a single block: every cut costs two operations more, and to share it would save less.
    """
    blocks = 1 if hidden < NARROW and hidden % TILE == 0 else math.gcd(hidden, MOST_BLOCKS)
    return blocks, 2, hidden // blocks


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x); gate and up are one fused projection (`fused_gates`)."""

    hidden: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fused = Projection(2 * self.hidden, self.use_bias, self.dtype, name="gate_up")(x)
        blocks, *_ = fused_gates(self.hidden)
        gate, up = jnp.split(fused.reshape(*x.shape[:-1], blocks, -1), 2, axis=-1)
        gated = (jax.nn.silu(gate) * up).reshape(*x.shape[:-1], self.hidden)
        return Projection(x.shape[-1], self.use_bias, self.dtype, name="down")(gated)


class MLP(nn.Module):
    """down(activation(up x)), with biases."""

    hidden: int
    activation: str  # as Hugging Face names it, one of ACTIVATIONS
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        up = Projection(self.hidden, True, self.dtype, name="up")(x)
        return Projection(x.shape[-1], True, self.dtype, name="down")(ACTIVATIONS[self.activation](up))


def norm_table(name: str, path: tuple[str, ...], width: int) -> dict[str, Parameter]:
    """Of `LayerNorm`, as `attention_table`."""
    return {
        f"{name}.{ours}": Parameter((*path, leaf), (width,)) for ours, leaf in (("weight", "scale"), ("bias", "bias"))
    }


def mlp_table(names: tuple[str, str], path: tuple[str, ...], hidden: int, width: int) -> dict[str, Parameter]:
    """Of `MLP`, as `attention_table`; `names` are those of the projections up and down."""
    up, down = names
    table = _whole(up, (*path, "up"), hidden, width, hidden, True)
    return table | _back(down, (*path, "down"), width, hidden, hidden, True)


def fused_attention_table(
    names: tuple[str, str], path: tuple[str, ...], heads: tuple[int, int], width: int, bias: bool
) -> dict[str, Parameter]:
    """Of `Attention` without groups, q, k and v in one tensor of a checkpoint, head by head as here (`fused_heads`).

    `names` are those of it and of the output, `heads` H and head_dim.
    """
    (qkv, output), (count, head_dim) = names, heads
    table = _whole(qkv, (*path, "qkv"), 3 * count * head_dim, width, count, bias)
    return table | _back(output, (*path, "output"), width, count * head_dim, count, bias)


def attention_table(
    name: str,
    path: tuple[str, ...],
    heads: tuple[int, int, int],
    width: int,
    biases: tuple[bool, bool] = (False, False),
    norms: bool = False,
) -> dict[str, Parameter]:
    """Of `Attention`: Hugging Face's names of its weights behind `name`, and where they live at `path`.

    `heads` are H, Hkv and head_dim; `biases` those of q, k and v, and of the output; `norms` those of queries and keys.
    """
    count, kv_heads, head_dim = heads
    table: dict[str, Parameter] = {}
    for kind, at in (("q", slice(-2)), ("k", -2), ("v", -1)):
        rows = (count if kind == "q" else kv_heads) * head_dim
        fused = Fused(fused_heads(*heads), at)
        table |= _fused(f"{name}{kind}_proj", (*path, "qkv"), rows, width, fused, biases[0])
    for kind, leaf in (("q", "query_norm"), ("k", "key_norm")) if norms else ():
        table[f"{name}{kind}_norm.weight"] = Parameter((*path, leaf, "scale"), (head_dim,))
    return table | _back(f"{name}o_proj", (*path, "output"), width, count * head_dim, kv_heads, biases[1])


def gated_mlp_table(
    name: str, path: tuple[str, ...], hidden: int, width: int, bias: bool = False
) -> dict[str, Parameter]:
    """Of `GatedMLP`, as `attention_table`."""
    gates = fused_gates(hidden)
    table = _fused(f"{name}gate_proj", (*path, "gate_up"), hidden, width, Fused(gates, 0), bias)
    table |= _fused(f"{name}up_proj", (*path, "gate_up"), hidden, width, Fused(gates, 1), bias)
    return table | _back(f"{name}down_proj", (*path, "down"), width, hidden, gates[0], bias)


def _back(name: str, path: tuple[str, ...], width: int, inputs: int, units: int, bias: bool) -> dict[str, Parameter]:
    """A projection back to the residual stream: devices share its inputs, and each adds the whole bias once summed."""
    table = {f"{name}.weight": Parameter((*path, "kernel"), (width, inputs), split=1, units=units)}
    return table | ({f"{name}.bias": Parameter((*path, "bias"), (width,))} if bias else {})


def _whole(name: str, path: tuple[str, ...], rows: int, width: int, units: int, bias: bool) -> dict[str, Parameter]:
    """A projection whose rows devices share, as the checkpoint has it."""
    table = {f"{name}.weight": Parameter((*path, "kernel"), (rows, width), split=0, units=units)}
    return table | ({f"{name}.bias": Parameter((*path, "bias"), (rows,), split=0, units=units)} if bias else {})


def _fused(name: str, path: tuple[str, ...], rows: int, width: int, fused: Fused, bias: bool) -> dict[str, Parameter]:
    units, *_ = fused.rows
    table = {f"{name}.weight": Parameter((*path, "kernel"), (rows, width), fused, split=0, units=units)}
    return table | ({f"{name}.bias": Parameter((*path, "bias"), (rows,), fused, split=0, units=units)} if bias else {})


def causal_mask(start: Array, width: int, slots: int, mask: Array | None, window: int | None = None) -> Array:
    """[B, T, S] bool: a query at slot start[b] + t sees the slots up to its own, and of these only those in `mask`.

    With a window the last so many of them, its own among them.
    By slot, not by position, so that a tree's nodes (several slots at one position) only need their ancestors masked.
    """
    query = start[:, None, None] + jnp.arange(width)[None, :, None]
    slot = jnp.arange(slots)[None, None, :]
    causal = slot <= query if window is None else (slot <= query) & (slot > query - window)
    return causal if mask is None else causal & mask
