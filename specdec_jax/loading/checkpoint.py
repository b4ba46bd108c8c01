"""The result of every loader, before conversion by a model family."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from specdec_jax.loading.tokenizer import Tokenizer


class Checkpoint(NamedTuple):
    """Weights with Hugging Face's names, read one at a time."""

    where: str  # the file or folder, for messages
    config: dict[str, Any]  # as in config.json, including `model_type`
    named: Iterable[tuple[str, Any]]  # (name, array), each read on access
    tokenizer: Tokenizer
