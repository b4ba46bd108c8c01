"""What every loader hands over before a model family has looked at it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from specdec_jax.loading.tokenizer import Tokenizer


class Checkpoint(NamedTuple):
    """Weights named as Hugging Face names them, read one at a time."""

    where: str  # the file or folder, for messages
    config: dict[str, Any]  # as config.json has it, `model_type` included
    named: Iterable[tuple[str, Any]]  # (name, array), each read when asked for
    tokenizer: Tokenizer
