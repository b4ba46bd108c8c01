"""Loading of models with weights and tokenizer by name, and saving to folders."""

from specdec_jax.loading.across import check_same_vocabulary as check_same_vocabulary
from specdec_jax.loading.across import for_target as for_target
from specdec_jax.loading.across import needs_translation as needs_translation
from specdec_jax.loading.draft_vocabulary import with_draft_vocabulary as with_draft_vocabulary
from specdec_jax.loading.hf_folder import save_hf_folder as save_hf_folder
from specdec_jax.loading.load import LoadedModel as LoadedModel
from specdec_jax.loading.load import download as download
from specdec_jax.loading.load import load_drafter as load_drafter
from specdec_jax.loading.load import load_model as load_model
from specdec_jax.loading.load import outline as outline
from specdec_jax.loading.load import refuse_encoders as refuse_encoders
from specdec_jax.loading.orbax_checkpoint import restore_orbax as restore_orbax
from specdec_jax.loading.orbax_checkpoint import save_orbax as save_orbax
from specdec_jax.loading.tokenizer import StreamDecoder as StreamDecoder
from specdec_jax.loading.tokenizer import Tokenizer as Tokenizer
