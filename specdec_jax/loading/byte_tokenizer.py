"""ByT5's tokenizer, which has no file: tokens are bytes (arXiv 2105.13626, section 3.1; transformers' ByT5Tokenizer).

Built as a byte-level tokenizer of the `tokenizers` library, so that streams respect characters and it can be saved.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CLASS = "ByT5Tokenizer"  # its name in tokenizer_config.json or config.json
DEFAULTS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in order of id, from 0, before the bytes
SENTINELS = 125


def byte_tokenizer(special: Mapping[str, str], sentinels: Sequence[str] | None = None) -> Tokenizer:
    """Ids 0 to 2 are the special tokens, 3 to 258 bytes, the rest sentinels (None: `<extra_id_0>` to 124)."""
    first = [special.get(role, text) for role, text in DEFAULTS.items()]
    vocabulary = {text: index for index, text in enumerate(first)}
    vocabulary |= {letter: len(first) + byte for letter, byte in bytes_by_letter().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True, normalized=False) for text in first])
    more = [f"<extra_id_{index}>" for index in range(SENTINELS)] if sentinels is None else sentinels
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in more])
    end = first[1]
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, vocabulary[end])])
    return tokenizer


def sentinels_of(config: Mapping[str, Any]) -> list[str] | None:
    """The extra tokens that a tokenizer_config.json lists or counts; None without either."""
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    if listed:
        return [token if isinstance(token, str) else token["content"] for token in listed]
    count = config.get("extra_ids")
    return None if count is None else [f"<extra_id_{index}>" for index in range(count)]


@functools.cache
def bytes_by_letter() -> dict[str, int]:
    """GPT-2's letter for every byte: printable ones are themselves, the others start at U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
