"""The jitted decoding programs: `draft_loop.py` drafts, `cache_feed.py` fills caches, `decoder.py` builds a Decoder.

Names are imported on first use, so that importing a drafter, which needs the draft loop, does not import the decoder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_jax.decoding.decoder import Decoder as Decoder
    from specdec_jax.decoding.decoder import LossyVerification as LossyVerification
    from specdec_jax.decoding.decoder import build_decoder as build_decoder
    from specdec_jax.decoding.decoder import default_widths as default_widths
    from specdec_jax.decoding.decoder import no_monitor as no_monitor

__all__ = ["Decoder", "LossyVerification", "build_decoder", "default_widths", "no_monitor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specdec_jax.decoding' has no attribute {name!r}")
    return getattr(importlib.import_module("specdec_jax.decoding.decoder"), name)
