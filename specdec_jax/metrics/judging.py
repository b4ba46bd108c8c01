"""Evaluation of a drafter along texts of its target: greedy agreement, and overlap of the two distributions.

The overlap is that of the sampled distributions: `sum min(p, q)` is the acceptance rate of rejection sampling (arXiv
2211.17192, corollary 3.6). Texts are fed to both models, so every position counts once, independent of a policy.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.cache_feed import window
from specdec_jax.decoding.sampling import argmax, distribution, make_warp
from specdec_jax.decoding.state import laid, refuse_encoder, slots_for
from specdec_jax.decoding.teacher_forcing import PREFILL, PairCache, Text, feed_both, filled_caches
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.loading import LoadedModel, check_same_vocabulary
from specdec_jax.replay.tracing import check_texts
from specdec_jax.text.pair import build_pair
from specdec_jax.types import Array, LanguageModel, Params, Warp

TEMPERATURES = (0.3, 0.7, 1.0)


class Judgement(NamedTuple):
    """The evaluation of a drafter on M texts; values per text are means over the positions of its answer."""

    agreement: np.ndarray  # [M] float64, share of positions at which both have the same most probable token
    acceptance: np.ndarray  # [M, N] float64, mean of sum min(p, q) at each of the temperatures
    positions: np.ndarray  # [M] int64, number of tokens of the answer
    temperatures: tuple[float, ...]  # N temperatures


def answers(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    warp: Mapping[str, Any] | None = None,
    seed: int | Sequence[int] = 0,
    batch: int = 16,
    past_end: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The target's answers to prompts of token ids (`generation.encode`), in order.

    Answers include the token that ends them, and continue after it with `past_end`. `warp`: arguments of `make_warp`;
    default: greedy. Prompt i is sampled with seed[i], or seed + i; prompts of similar length share a batch.
    `progress(done, total)` counts prompts. Raises ValueError: an empty or too long prompt, a token outside the
    vocabulary, numbers out of range, or a target with an encoder.
    """
    if batch < 1 or max_new_tokens < 1:
        raise ValueError(f"batch and max_new_tokens must be positive, got {batch!r} and {max_new_tokens!r}")
    refuse_encoder(target.model, "judging")
    pair = build_pair(target, None, verification_widths=(1,))
    options = {
        "warp": make_warp(batch, **(warp or {})),
        "stop_ids": () if past_end else sorted({*target.model.spec.eos_ids, *target.tokenizer.eos_ids}),
    }
    seeds = [(seed + index) % 2**32 for index in range(len(prompts))] if isinstance(seed, int) else list(seed)
    by_row: dict[int, list[int]] = {}
    for members in alike([len(prompt) for prompt in prompts], batch):
        rows = [members[0]] * (batch - len(members)) + members  # the last batch is padded with rows that end at once
        state = pair.decoder.prefill(
            pair.params,
            [prompts[member] for member in rows],
            max_new_tokens=[0] * (batch - len(members)) + [max_new_tokens] * len(members),
            seed=[seeds[member] for member in rows],
            slots=slots_for(len(prompts[members[-1]]), max_new_tokens, 1),
            **options,
        )
        state = pair.decoder.run(pair.params, state)
        tokens, begin, end = (np.asarray(leaf) for leaf in (state.tokens, state.prompt_length, state.length))
        for row, member in enumerate(rows):
            by_row[member] = tokens[row, begin[row] : end[row]].tolist()
        if progress is not None:
            progress(len(by_row), len(prompts))
    return [by_row[index] for index in range(len(prompts))]


def judge(
    target: LoadedModel,
    drafter: LoadedModel,
    texts: Sequence[Text],
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    batch: int = 8,
    chunk: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Judgement:
    """Both models' distributions along (prompt, answer) texts, compared before every token of the answers, in float32.

    At temperature 0 the distributions are one-hot, and the overlap is the agreement. `batch` texts of similar length
    share a pass; memory holds the logits of batch * chunk positions for both models. `progress(done, total)` counts
    texts. Raises ValueError for different vocabularies, a drafter that reads another target, an empty prompt or answer,
    or a text longer than the target's context.
    """
    check_same_vocabulary(target, drafter)
    if batch < 1 or chunk < 1:
        raise ValueError(f"batch and chunk must be positive, got {batch!r} and {chunk!r}")
    check_texts(texts, target.model.spec.context)
    for index, (prompt, answer) in enumerate(texts):
        if not 0 <= min(*prompt, *answer) <= max(*prompt, *answer) < target.model.spec.vocab_size:
            raise ValueError(f"text {index} has tokens outside the vocabulary of {target.model.spec.vocab_size}")
    warps = [make_warp(batch * chunk, temperature) for temperature in temperatures]
    if not warps:
        raise ValueError("judging needs at least one temperature")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *warps)
    (fill, compare), weights = _programs(target.model, drafter.model, chunk), (target.params, drafter.params)
    agreement, mass = np.zeros(len(texts)), np.zeros((len(texts), len(warps)))
    sizes, done = np.array([len(answer) for _, answer in texts], np.int64), 0
    for members in alike([len(prompt) + len(answer) for prompt, answer in texts], batch):
        rows = [texts[member] for member in members]
        longest, lengths = max(len(prompt) + len(answer) for prompt, answer in rows), sizes[members]
        slots = slots_for(longest, max(chunk, PREFILL), 0)  # room for whole passes at any position of a row
        padded = [[*prompt, *answer] for prompt, answer in rows] + [[]] * (batch - len(rows))
        device, fed = jnp.asarray(laid(padded, slots)), np.zeros((batch,), np.int32)
        fed[: len(rows)] = [len(prompt) - 1 for prompt, _ in rows]  # its last token gives the first distribution
        caches, compared = fill(weights, device, fed.max()), []
        for step in range(0, int(lengths.max()), chunk):
            *both, caches = compare(weights, device, caches, fed + np.int32(step), stacked)
            compared.append(both)
        same, shared = (np.concatenate(parts, axis=-1) for parts in zip(*jax.device_get(compared), strict=True))
        counted = np.arange(same.shape[1])[None, :] < lengths[:, None]
        agreement[members] = (same[: len(rows)] & counted).sum(axis=1) / lengths
        shared = shared[:, : len(rows)].astype(np.float64)
        mass[members] = (np.where(counted, shared, 0.0).sum(axis=2) / lengths).T
        done += len(members)
        if progress is not None:
            progress(done, len(texts))
    return Judgement(agreement, mass, sizes, tuple(float(temperature) for temperature in temperatures))


@functools.lru_cache(maxsize=8)
def _programs(
    target: LanguageModel, drafter: LanguageModel, chunk: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both caches filled, and the comparison of a chunk of positions, for any weights of two models."""
    models = (target, with_vocabulary(drafter, target.spec.vocab_size))

    def compare(
        weights: tuple[Params, Params], tokens: Array, caches: PairCache, start: Array, warps: Warp
    ) -> tuple[Array, Array, PairCache]:
        """(agreement [B, C] bool, mass [N, B, C] float32, caches) of N warps."""
        fed = window(tokens, start, chunk)
        *both, after = feed_both(models, weights, fed, caches, start)
        flat = [logits.reshape(-1, logits.shape[-1]) for logits in both]

        def mass(warp: Warp) -> Array:
            p, q = (jnp.exp(distribution(logits, warp).log_prob) for logits in flat)
            return jnp.sum(jnp.minimum(p, q), axis=-1).reshape(fed.shape)

        same = (argmax(flat[0]) == argmax(flat[1])).reshape(fed.shape)
        return same, lax.map(mass, warps), after

    return jax.jit(functools.partial(filled_caches, models)), jax.jit(compare, donate_argnums=2)


def alike(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Batches of indices in order of length, to minimise padding."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return (order[begin : begin + batch] for begin in range(0, len(order), batch))
