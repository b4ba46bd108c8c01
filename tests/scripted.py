"""Models that know their text: logits by position only, so a test says what is drafted, accepted and rejected where."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_weights import CONFIG, write_tokenizer

from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.tokenizer import tokenizer_from_folder
from specdec_jax.models.adapters import from_logits_function
from specdec_jax.stopping import static
from specdec_jax.text.generation import Pair, build_pair
from specdec_jax.types import ModelSpec

PROMPT = "x"  # one token: the script begins at slot 1
SLOTS = 192
EOS = CONFIG["eos_token_id"]
OPTIONS = {"chat": False, "slots": SLOTS}


@functools.cache
def tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return tokenizer_from_folder(folder).for_model((EOS,), CONFIG["vocab_size"])


def tokens_of(text: str) -> list[int]:
    return tokenizer().encode(text)


def _logits(params, tokens):
    row = jax.nn.one_hot(params, CONFIG["vocab_size"], dtype=jnp.float32) * 30
    return jnp.broadcast_to(row[None, : tokens.shape[1]], (*tokens.shape, row.shape[-1]))


def _params(script: list[int]) -> np.ndarray:
    """Entry s is what follows slot s: the script, then ends of sequence."""
    return np.array([*script, *[EOS] * (SLOTS - len(script))], np.int32)


@functools.cache
def _parts():
    spec = ModelSpec(CONFIG["vocab_size"], SLOTS - 8, (EOS,))
    target, drafter = (from_logits_function(_logits, spec) for _ in range(2))
    return target, drafter, static(draft_length=3)


def scripted_pair(target: list[int], drafter: list[int]) -> Pair:
    """A pair that emits `target` (token ids, then an end of sequence) and drafts `drafter`, three a round.

    All such pairs share one compiled program: the scripts are parameters.
    """
    big, small, policy = _parts()
    models = [LoadedModel(m, _params(s), tokenizer(), "scripted", None) for m, s in ((big, target), (small, drafter))]
    pair = build_pair(*models, policy=policy, max_draft_length=3, verification_widths=(4,))
    return pair._replace(params=ModelParams(*(model.params for model in models)))


def wrong_at(script: list[int], *positions: int) -> list[int]:
    """The script with another token at some positions: drafts that will be rejected."""
    wrong = tokens_of("#")[0]
    return [wrong if i in positions else token for i, token in enumerate(script)]
