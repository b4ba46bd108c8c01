"""Adapters to `types.LanguageModel`, and `check_model`, which says what is wrong with one (docs/your_model.md)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import attention, layers
from specdec_jax.types import Array, Cache, Hidden, LanguageModel, ModelSpec, Params


class TokenCache(NamedTuple):
    """The cache of a model without a cache: the tokens."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32, number of valid tokens; a causal model never reads the others


class RowCaches(NamedTuple):
    """The cache of `per_row`: a cache of batch one for every row."""

    rows: Cache  # leaves [B, ...]
    length: Array  # [B] int32


def from_function(
    apply: Callable[[Params, Array, Cache], tuple[Array, Cache]],
    init_cache: Callable[[Params, int, int], Cache],
    spec: ModelSpec,
    with_length: Callable[[Cache, Array], Cache] = attention.with_length,
) -> LanguageModel:
    """A model from `apply(params, tokens [B, T], cache) -> (logits [B, T, V], cache)` and `init_cache(params, batch,
    slots)`, without support for trees and encoders.

    The cache is a pytree, row b written from slot `cache.length[b]`; without `with_length` it is a NamedTuple. Modules
    of nnx are split once, outside: `graph, params = nnx.split(module)`, and merged in `apply`.

    Raises ValueError, at tracing, for logits of another shape, a cache without `length`, and `positions` or `mask`.
    """

    def init(params, batch, slots, source=None):
        if source is not None:
            raise ValueError("this model takes no source: its init_cache has three arguments")
        cache = init_cache(params, batch, slots)
        if with_length is attention.with_length and "length" not in getattr(cache, "_fields", ()):
            kind = type(cache).__name__
            raise ValueError(
                f"init_cache must return a NamedTuple with a field `length` [B] int32, not a {kind}, unless "
                "`with_length` is given"
            )
        return cache

    def checked_apply(params, tokens, cache, positions=None, mask=None):
        if positions is not None or mask is not None:
            raise ValueError("this adapter serves plain causal passes: positions and mask must be None")
        logits, cache = apply(params, tokens, cache)
        if logits.shape != (shape := (*tokens.shape, spec.vocab_size)):
            raise ValueError(f"the function returned logits of shape {logits.shape} instead of {shape}")
        return logits.astype(jnp.float32), cache

    return LanguageModel(init, checked_apply, with_length, spec)


def from_logits_function(function: Callable[[Params, Array], Array], spec: ModelSpec) -> LanguageModel:
    """A model from `function(params, tokens [B, S] int32) -> logits [B, S, V]`, for toys and models without a cache.

    The function must be causal: entry s may depend on tokens 0..s only. Every pass recomputes all S slots.

    Raises ValueError, at tracing, for logits with another vocabulary size and for `positions` or `mask`.
    """

    def init_cache(params, batch, slots):
        return TokenCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def apply(params, tokens, cache):
        slots = cache.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
        rows = jnp.arange(tokens.shape[0])[:, None]
        text = cache.tokens.at[rows, slots].set(tokens.astype(jnp.int32), mode="drop", unique_indices=True)
        logits = jnp.take_along_axis(function(params, text), slots[:, :, None], axis=1, mode="clip")
        return logits, TokenCache(text, cache.length + tokens.shape[1])

    return from_function(apply, init_cache, spec)


def per_row(model: LanguageModel) -> LanguageModel:
    """The model with a write position per row, made from one whose batch has a single position, by `jax.vmap`.

    Only caches of batch one are made of the given model, whose `with_length` sets that position from an array [1].
    `hidden` works as before, `positions`, `mask` and sources do not. Costs: docs/your_model.md.
    """

    def init_cache(params, batch, slots):
        single = model.init_cache(params, 1, slots)
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *jnp.shape(leaf))), single)
        return RowCaches(rows, jnp.zeros((batch,), jnp.int32))

    def mapped(function, params, tokens, cache, *more):
        def row(tokens, cache, length):
            *outputs, cache = function(params, tokens[None], model.with_length(cache, length[None]), *more)
            return [output[0] for output in outputs], cache

        outputs, rows = jax.vmap(row)(tokens, cache.rows, cache.length)
        return *outputs, RowCaches(rows, cache.length + tokens.shape[1])

    passes = {name: getattr(model.hidden, name) for name in ("last", "streams")}
    passes = {name: functools.partial(mapped, function) for name, function in passes.items() if function is not None}
    spec = model.spec._replace(by_position=False)
    made = from_function(functools.partial(mapped, model.apply), init_cache, spec)
    return made.replace(hidden=model.hidden._replace(**passes))


def check_model(
    model: LanguageModel,
    params: Params,
    *,
    reference: Callable[[Array], Any] | None = None,
    num_tokens: int = 8,
    tolerance: float | None = None,
) -> float:
    """Checks that a model keeps the contract of `LanguageModel` (docs/your_model.md), by passes over random tokens.

    Args:
        params: trained ones, or random ones so large that tokens matter.
        reference: the original's logits [1, T, V] of tokens [1, T] int32 in one pass. Without it positions that are
            wrong alike in all passes go unnoticed.
        num_tokens: length T of the texts, 4 or more; more than its window for a cache that holds only a window.
        tolerance: the largest difference allowed between two ways to compute a logit, in units of the largest logit;
            None: 1e-4, or 0.05 where a parameter or the cache has fewer than 32 bits.

    Returns:
        The largest such difference.

    Raises:
        ValueError: one line that names the property that does not hold; or a model with an encoder.
    """
    if model.spec.source is not None:
        raise ValueError("check_model needs a model without an encoder: bind a source with with_source")
    vocab, half, batch, worst = model.spec.vocab_size, num_tokens // 2, 3, 0.0
    init_cache, apply = jax.jit(model.init_cache, static_argnums=(1, 2)), jax.jit(model.apply)
    tokens, others = np.random.default_rng(0).integers(0, vocab, (2, batch, num_tokens)).astype(np.int32)
    fresh, one_row = (init_cache(params, rows, 2 * num_tokens) for rows in (batch, 1))
    bits = [leaf.dtype.itemsize for leaf in jax.tree.leaves((params, fresh)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    limit = tolerance or (1e-4 if min(bits, default=4) >= 4 else 0.05)

    def require(holds: bool, wrong: str) -> None:
        if not holds:
            raise ValueError(f"check_model: {wrong}")

    def shapes(tree: Any) -> dict[str, str]:
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        return {path: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for path, leaf in leaves.items()}

    def equal(logits: Any, expected: Any, wrong: str) -> None:
        nonlocal worst
        logits, expected = np.asarray(logits, np.float32), np.asarray(expected, np.float32)
        require(logits.shape == expected.shape, f"{wrong}: {logits.shape} instead of {expected.shape}")
        with np.errstate(invalid="ignore"):  # logits of -inf are equal
            difference = np.where(logits == expected, 0, np.abs(logits - expected)) / largest
        row, position = np.unravel_index(np.argmax(difference), difference.shape)[:2]
        place = f"in row {row}, position {position} of the pass, by {difference.max():.1e} of the largest logit"
        require(bool((difference <= limit).all()), f"{wrong} ({place}; {limit:g} is allowed)")
        worst = max(worst, float(difference.max()))

    def run(text: np.ndarray, cache: Cache) -> tuple[np.ndarray, Cache]:
        logits, cache = apply(params, text, cache)
        return np.asarray(logits), cache

    def cut(cache: Cache, *lengths: int) -> Cache:
        return model.with_length(cache, jnp.asarray(lengths, jnp.int32))

    def check_hidden(hidden: Hidden) -> None:
        equal(apply(hidden.prepared(params), tokens, fresh)[0], whole, "hidden.prepared changes the result of apply")
        if hidden.last is not None and hidden.kernel is not None:
            states, kernel = jax.jit(hidden.last)(params, tokens, fresh)[0], hidden.kernel(params)
            product = layers.soft_cap(layers.project(states, kernel, hidden.dtype or kernel.dtype), hidden.cap)
            equal(product, whole, "hidden.last times hidden.kernel differs from apply")
        if hidden.streams is not None:
            logits, states, _ = jax.jit(hidden.streams, static_argnums=3)(params, tokens, fresh, (0, hidden.num_layers))
            shape = (batch, num_tokens, 2, hidden.width)
            require(states.shape == shape, f"hidden.streams must return hidden states {shape}, not {states.shape}")
            equal(logits, whole, "hidden.streams differs from apply")

    def check_arguments() -> None:
        double = lambda leaf: 2 * leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf  # noqa: E731
        other, _ = apply(jax.tree.map(double, params), tokens, fresh)
        require(not np.array_equal(other, whole), "logits do not depend on `params`: apply must not bring its own")
        context, sizes = model.spec.context, []
        for slots in (num_tokens, context):
            sizes.append(shapes(jax.eval_shape(lambda params, slots=slots: model.init_cache(params, 1, slots), params)))
        fits = sizes[0] != sizes[1] or any(context in leaf.shape for leaf in jax.tree.leaves(one_row))
        require(fits, f"init_cache has no room for the context, {context} tokens: it must use `slots`")

    def check_shapes() -> None:
        try:
            returned, after = jax.eval_shape(model.apply, params, tokens, fresh)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"check_model: a pass, or `with_length` before it, raises {message}") from error
        wanted = {"": f"float32[{batch}, {num_tokens}, {vocab}]"}
        require(shapes(returned) == wanted, f"a pass must return logits {wanted['']}, not {shapes(returned).get('')}")
        before = shapes(fresh)
        for function, now in ("a pass", shapes(after)), ("with_length", shapes(cut(fresh, 0, 0, 0))):
            for path in sorted(dict(before.items() ^ now.items())):
                change = f"{path} was {before.get(path)} and is {now.get(path)}"
                require(False, f"{function} must return the cache with its shapes and dtypes, but {change}")

    kind, length = type(fresh).__name__, shapes(getattr(fresh, "length", None))
    wanted = {"": f"int32[{batch}]"}
    advice = "; one position for all rows needs `with_length` and `per_row`"
    require(length == wanted, f"the cache (a {kind}) must have `length` [B] int32, not {length.get('')}{advice}")
    check_shapes()
    with jax.default_matmul_precision("highest"):
        whole, full = run(tokens, fresh)
        require(not np.isnan(whole).any(), "logits are NaN")
        largest = np.abs(whole[np.isfinite(whole)]).max(initial=1e-30)
        changed, _ = run(np.concatenate([tokens[:, :-1], (tokens[:, -1:] + 1) % vocab], axis=1), fresh)
        equal(changed[:, :-1], whole[:, :-1], "logits depend on later tokens")
        reads = not np.array_equal(changed[:, -1], whole[:, -1])
        require(reads, "logits do not depend on the token at their position: they must predict the token after it")
        if reference is not None:
            equal(reference(jnp.asarray(tokens[:1])), whole[:1], "one pass differs from the reference")
        used = cut(run(others, fresh)[1], 0, 0, 0)
        equal(run(tokens, used)[0], whole, "a cache that was rolled back differs from an empty one")
        equal(run(tokens[:, :1], used)[0], run(tokens[:, :1], fresh)[0], "slots from `length` on are read")
        parts = [run(tokens[:, :half], fresh)]
        for at in range(half, num_tokens):
            parts.append(run(tokens[:, at : at + 1], parts[-1][1]))
        steps = np.concatenate([part for part, _ in parts], axis=1)
        equal(steps, whole, "a text in several passes differs from one pass")
        rest, _ = run(tokens[:, half:], cut(full, half, half, half))
        equal(rest, whole[:, half:], "a cache that was rolled back to a part differs from one of that part alone")
        rows = [run(tokens[row : row + 1], one_row)[0][0] for row in range(batch)]
        equal(np.stack(rows), whole, "rows together differ from rows alone")
        lengths = half, half // 2, 0
        mixed = np.stack([[*tokens[row, :n], *others[row, n:]] for row, n in enumerate(lengths)])
        at = np.asarray(lengths)[:, None] + np.arange(half)
        ragged, _ = run(np.take_along_axis(mixed, at, 1), cut(full, *lengths))
        expected = np.take_along_axis(run(mixed, fresh)[0], at[:, :, None], 1)
        equal(
            ragged,
            expected,
            "rows of different lengths differ from others: they need a write position each (`per_row`)",
        )
        check_hidden(model.hidden)
        check_arguments()
    return worst


def with_source(model: LanguageModel, tokens: Sequence[int]) -> LanguageModel:
    """A model with an encoder as one without: every row has this source.

    For code without sources: proofs, and measurements of passes. Raises ValueError for a model without an encoder.
    """
    if model.spec.source is None:
        raise ValueError("this model has no encoder: there is nothing that would read a source")
    ids = np.asarray(tokens, np.int32)

    def init_cache(params, batch, slots, source=None):
        if source is not None:
            raise ValueError("this model has its source already")
        repeated = jnp.broadcast_to(ids[None], (batch, ids.size)), jnp.full((batch,), ids.size, jnp.int32)
        return model.init_cache(params, batch, slots, repeated)

    return model.replace(init_cache=init_cache, spec=model.spec._replace(source=None))


def with_vocabulary(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """The same model over `vocab_size` tokens: logits of padding tokens are cut, those of missing tokens are -inf.

    For pairs that share a tokenizer but not the padding of their embeddings; the caller must check that common tokens
    have the same meaning. Raises ValueError for a size below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    if vocab_size == model.spec.vocab_size:
        return model

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = model.apply(params, tokens, cache, positions, mask)
        return resized(logits, vocab_size), cache

    streams: Any = model.hidden.streams

    def tapped(params, tokens, cache, layers, positions=None, mask=None):
        logits, hidden, cache = streams(params, tokens, cache, layers, positions, mask)
        return resized(logits, vocab_size), hidden, cache

    spec = model.spec._replace(vocab_size=vocab_size)
    hidden = model.hidden._replace(last=None, kernel=None, streams=None if streams is None else tapped)
    return LanguageModel(model.init_cache, apply, model.with_length, spec, hidden)


def resized(values: Array, size: int) -> Array:
    """Values [..., V] cut to [..., size], or padded with -inf."""
    missing = size - values.shape[-1]
    if missing < 0:
        return values[..., :size]
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
