"""A sampler for training loops: prompts to tokens, their log-probabilities and a mask, inside a program of yours."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.decoder import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.monitors.log_probs import LogProbs, log_probs
from specdec_jax.stopping.survival import survival
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Array, Drafter, LanguageModel, Params, Statistics, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection


class Samples(NamedTuple):
    """What a sampler gives; entries without a token are 0."""

    tokens: Array  # [B, N] int32, the new ones, an end of sequence among them
    log_probs: LogProbs  # [B, N] float32 each, nats: raw, and warped as sampled
    mask: Array  # [B, N] bool, where there is a token
    statistics: Statistics  # counts by row; `summarise` has the acceptance rate


def sampler(
    target: LanguageModel,
    drafter: Drafter,
    sampling: SamplingParams = SamplingParams(temperature=1.0),
    *,
    policy: StoppingPolicy = survival(),
    verifier: Verifier = rejection(),
    **options: Any,
) -> Callable[..., Samples]:
    """A pure function sample(params, drafter_params, prompts, seed=0) -> Samples, jitted; it works in a `jit` of yours.

    Parameters are arguments: refreshing those of the target, of the drafter or of both compiles nothing. Another number
    of prompts, or other lengths, compile. Row b has seed + b, or the seeds [B] given; a key of `jax.random` is a seed
    too. The tokens are the target's samples, whatever the drafter's parameters, and their log-probabilities those of
    the pass that verified them.

    Args:
        sampling: temperature, top-k, top-p, min-p, N (`max_new_tokens`) and `stop_ids`; its seed is not read.
        options: of `build_decoder`.

    Raises:
        ValueError: stop strings, which tokens do not show; or as `build_decoder`.
    """
    if sampling.stop_strings:
        raise ValueError(f"a sampler decodes no text: give stop_ids in place of stop={sampling.stop!r}")
    size = sampling.max_new_tokens
    options["monitor"] = log_probs(size, options.get("monitor"))
    decoder = build_decoder(target, drafter, policy, verifier, **options)

    @jax.jit
    def sampled(params: ModelParams, prompts: Sequence[Array], seed: Any) -> Samples:
        warp = make_warp(len(prompts), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        request = {"max_new_tokens": size, "stop_ids": sampling.stop_ids, "warp": warp, "seed": seed}
        state = decoder.run(params, decoder.prefill(params, prompts, **request))
        index, begin = jnp.arange(size, dtype=jnp.int32)[None, :], state.prompt_length[:, None]
        mask = index < state.length[:, None] - begin
        tokens = jnp.take_along_axis(state.tokens, begin + index, axis=1)
        tokens, seen = jax.tree.map(lambda leaf: jnp.where(mask, leaf, 0), (tokens, state.monitor.log_probs))
        return Samples(tokens, seen, mask, state.statistics)

    def sample(params: Params, drafter_params: Params, prompts: Sequence[Any], seed: Any = 0) -> Samples:
        rows = [jnp.asarray(prompt, jnp.int32) for prompt in prompts]
        return sampled(ModelParams(params, drafter_params), rows, seed)

    return sample
