"""A sampler for training loops: from prompts to tokens, their log-probabilities and a mask, usable inside `jit`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from specdec_jax.decoding.decoder import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.models.weights import check_finite, is_finite
from specdec_jax.monitors.log_probs import LogProbs, log_probs
from specdec_jax.ranges import Between
from specdec_jax.sharding import on_host
from specdec_jax.stopping.survival import survival
from specdec_jax.strategy import named_call
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Array, DecodeState, Drafter, LanguageModel, Params, Statistics, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection


class Samples(NamedTuple):
    """The result of a sampler, with n rows (B = prompts * n) for each prompt; entries without a token are 0."""

    tokens: Array  # [B, N] int32, new tokens, including an end of sequence
    log_probs: LogProbs  # [B, N] float32 each, nats: raw, of the sampled distribution, and at its temperature alone
    mask: Array  # [B, N] bool, True for tokens
    statistics: Statistics  # counts by row; `summarise` has the acceptance rate
    finite: Array  # [B] bool, False: NaN in the target's logits, or NaN or infinity in a parameter (then for all rows)


def sampler(
    target: LanguageModel,
    drafter: Drafter,
    sampling: SamplingParams = SamplingParams(temperature=1.0),
    *,
    n: int = 1,
    policy: StoppingPolicy = survival(),
    verifier: Verifier = rejection(),
    **options: Any,
) -> Callable[..., Samples]:
    """A pure function sample(params, drafter_params, prompts, seed=0, lengths=None) -> Samples, usable inside `jit`.

    Prompts are sequences of tokens, or an array [prompts, P] that is padded at the end, with `lengths` [prompts].
    Parameters, prompts, lengths and seeds are arguments: only another number of prompts or another bucket of slots
    compiles. P decides the bucket, without `lengths` the longest prompt. Each prompt is prefilled once, and prompt i
    has the rows i * n to i * n + n - 1. Row b has seed + b, or seed[b] for seeds [prompts * n]; keys of `jax.random`
    are accepted too. A row depends on its prompt and seed alone, so a loop that repeats prompts adds the number of rows
    to the seed in every step. The tokens are samples of the target for any finite parameters of the drafter, and their
    log-probabilities are those of the verification pass.

    Args:
        sampling: temperature, top-k, top-p, min-p, N (`max_new_tokens`) and `stop_ids`; its seed is not used.
        n: samples per prompt.
        options: of `build_decoder`.

    Raises:
        ValueError: stop strings, which require text; n below 1; or as `build_decoder`. `sample`: as `fresh_state`; and
            outside of a caller's `jit`, after decoding, for parameters or logits that are not `finite`. The check reads
            the weights once on their device; inside a `jit` the caller has `finite`.
    """
    if sampling.stop_strings:
        raise ValueError(f"a sampler decodes no text: give stop_ids in place of stop={sampling.stop!r}")
    Between(1, whole=True).check("n", n)
    options["monitor"] = log_probs(sampling.max_new_tokens, options.get("monitor"))
    decoder = named_call("sampler", build_decoder)(target, drafter, policy, verifier, **options)
    request = {"max_new_tokens": sampling.max_new_tokens, "stop_ids": sampling.stop_ids, "n": n}

    @jax.jit
    def gathered(params: ModelParams, state: DecodeState) -> Samples:
        index, begin = jnp.arange(sampling.max_new_tokens, dtype=jnp.int32)[None, :], state.prompt_length[:, None]
        mask = index < state.length[:, None] - begin
        tokens = jnp.take_along_axis(state.tokens, begin + index, axis=1)
        tokens, seen = jax.tree.map(lambda leaf: jnp.where(mask, leaf, 0), (tokens, state.monitor.log_probs))
        finite = jax.tree.reduce(jnp.logical_and, jax.tree.map(is_finite, params), True)
        return Samples(tokens, seen, mask, state.statistics, finite & ~jnp.any(jnp.isnan(seen.raw), axis=1))

    def sample(params: Params, drafter_params: Params, prompts: Any, seed: Any = 0, lengths: Any = None) -> Samples:
        weights = ModelParams(params, drafter_params)
        warp = make_warp(len(prompts) * n, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        rows = {"warp": warp, "seed": seed, "lengths": lengths}
        samples = gathered(weights, decoder.run(weights, decoder.prefill(weights, prompts, **request, **rows)))
        if not isinstance(samples.finite, Tracer) and not (finite := on_host(samples.finite)).all():
            check_finite(params, "params")
            check_finite(drafter_params, "drafter_params")
            raise ValueError(f"row {finite.argmin()}: the target's logits have NaN, and its parameters have none")
        return samples

    return sample
