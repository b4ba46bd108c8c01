"""A sampler for training loops: from prompts to tokens, their log-probabilities and a mask, usable inside `jit`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from specdec_jax.decoding.decoder import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.models.weights import check_finite
from specdec_jax.monitors.log_probs import LogProbs, log_probs
from specdec_jax.stopping.survival import survival
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Array, Drafter, LanguageModel, Params, Statistics, StoppingPolicy, Verifier
from specdec_jax.verification.rejection import rejection


class Samples(NamedTuple):
    """The result of a sampler; entries without a token are 0."""

    tokens: Array  # [B, N] int32, new tokens, including an end of sequence
    log_probs: LogProbs  # [B, N] float32 each, nats: raw, and of the sampled distribution
    mask: Array  # [B, N] bool, True for tokens
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
    """A pure function sample(params, drafter_params, prompts, seed=0) -> Samples, jitted and usable inside `jit`.

    Parameters are arguments, so updates of the target's or the drafter's need no compilation; another number of prompts
    or other lengths do. Row b has seed + b, or seed[b] for seeds [B]; keys of `jax.random` are accepted too. The tokens
    are samples of the target for any parameters of the drafter, and their log-probabilities are those of the
    verification pass.

    Args:
        sampling: temperature, top-k, top-p, min-p, N (`max_new_tokens`) and `stop_ids`; its seed is not used.
        options: of `build_decoder`.

    Raises:
        ValueError: stop strings, which require text; or as `build_decoder`. `sample`: parameters with NaN or infinity,
            outside of a caller's `jit`; the check costs a read of the weights before decoding begins.
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
        for name, tree in (("params", params), ("drafter_params", drafter_params)):
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
                check_finite(tree, name)
        rows = [jnp.asarray(prompt, jnp.int32) for prompt in prompts]
        return sampled(ModelParams(params, drafter_params), rows, seed)

    return sample
