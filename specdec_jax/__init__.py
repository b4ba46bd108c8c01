"""Adaptive speculative decoding in JAX: AdaEDL and other policies inside one jitted `lax.while_loop`, proven lossless.

    >>> import specdec_jax as sd
    >>> sd.generate("Why is the sky blue?").text

`load_model` reads weights, `generate` and `stream` decode text, `build_decoder` provides `prefill`, `step` and `run`.
Policies are in `specdec_jax.stopping`, verifiers in `specdec_jax.verification`.

Names are imported on first use, so that `--help` and the loaders start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_jax import drafters as drafters
    from specdec_jax import stopping as stopping
    from specdec_jax import verification as verification
    from specdec_jax.contrib.beam_search import Hypothesis as Hypothesis
    from specdec_jax.contrib.beam_search import beam_search as beam_search
    from specdec_jax.decoding import LossyVerification as LossyVerification
    from specdec_jax.decoding import build_decoder as build_decoder
    from specdec_jax.decoding.rounds import ModelParams as ModelParams
    from specdec_jax.decoding.sampling import make_warp as make_warp
    from specdec_jax.decoding.summaries import summarise as summarise
    from specdec_jax.loading import load_model as load_model
    from specdec_jax.strategy import strategy as strategy
    from specdec_jax.text.citations import citations as citations
    from specdec_jax.text.generation import Generation as Generation
    from specdec_jax.text.generation import build_pair as build_pair
    from specdec_jax.text.generation import generate as generate
    from specdec_jax.text.pair import measure_costs as measure_costs
    from specdec_jax.text.sampler import sampler as sampler
    from specdec_jax.text.sampling_params import SamplingParams as SamplingParams
    from specdec_jax.text.streaming import Chunk as Chunk
    from specdec_jax.text.streaming import stream as stream

__version__ = "0.1.0"

_NAMES = {
    "contrib.beam_search": ("Hypothesis", "beam_search"),
    "decoding": ("build_decoder", "LossyVerification"),
    "decoding.rounds": ("ModelParams",),
    "decoding.sampling": ("make_warp",),
    "decoding.summaries": ("summarise",),
    "loading": ("load_model",),
    "strategy": ("strategy",),
    "text.citations": ("citations",),
    "text.generation": ("Generation", "build_pair", "generate"),
    "text.pair": ("measure_costs",),
    "text.sampler": ("sampler",),
    "text.sampling_params": ("SamplingParams",),
    "text.streaming": ("Chunk", "stream"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_FOLDERS = ("drafters", "stopping", "verification")

__all__ = [*_HOMES, *_FOLDERS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"specdec_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec_jax.{_HOMES[name]}"), name)
