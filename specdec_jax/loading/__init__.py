"""Loading of models with weights and tokenizer by name, and saving to folders."""

from specdec_jax.loading.across import check_same_vocabulary, for_target, needs_translation
from specdec_jax.loading.draft_vocabulary import with_draft_vocabulary
from specdec_jax.loading.hf_folder import save_hf_folder
from specdec_jax.loading.load import (
    LoadedModel,
    download,
    load_drafter,
    load_model,
    load_pair,
    outline,
    refuse_encoders,
)
from specdec_jax.loading.orbax_checkpoint import restore_orbax, save_orbax
from specdec_jax.loading.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "LoadedModel",
    "StreamDecoder",
    "Tokenizer",
    "check_same_vocabulary",
    "download",
    "for_target",
    "load_drafter",
    "load_model",
    "load_pair",
    "needs_translation",
    "outline",
    "refuse_encoders",
    "restore_orbax",
    "save_hf_folder",
    "save_orbax",
    "with_draft_vocabulary",
]
