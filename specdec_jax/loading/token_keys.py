"""The bytes (or text, if special) that tokens stand for, and the ids of the same token in two tokenizers.

Byte-level tokens (GPT-2's letters for bytes) and SentencePiece's (U+2581 for a space, <0x0A> for a byte) are bytes.
"""

import functools
import re
from collections.abc import Iterator, Mapping

from specdec_jax.loading.byte_tokenizer import bytes_by_letter
from specdec_jax.loading.tokenizer import ROLES, Tokenizer

SPACE = "\u2581"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Key = bytes | str  # the bytes that a token stands for; for special tokens their text


def ids_in(tokenizer: Tokenizer, other: Tokenizer) -> dict[Key, int]:
    """The tokenizer's id for every key; special tokens that only the other one has are matched by role."""
    return {**dict(_by_role(other, tokenizer)), **ids_by_key(tokenizer)}


@functools.lru_cache(maxsize=2)  # for a pair; a quarter of a million tokens take a second
def ids_by_key(tokenizer: Tokenizer) -> Mapping[Key, int]:
    """The id for every key; if there are several the first, and bytes by number (<0x68>) last."""
    by_number = {token for text, token in tokenizer.vocabulary().items() if BYTE.fullmatch(text)}
    keys = sorted(keys_of(tokenizer).items(), key=lambda item: (item[0] in by_number, item[0]), reverse=True)
    return {key: token for token, key in keys}


def _by_role(other: Tokenizer, tokenizer: Tokenizer) -> Iterator[tuple[Key, int]]:
    """The other's special tokens with another name in the tokenizer: beginning, end, padding, unknown."""
    for role in ROLES:
        theirs, ours = other.special.get(role), tokenizer.special.get(role)
        token_id = None if ours is None else tokenizer.backend.token_to_id(ours)
        if theirs is not None and token_id is not None:
            yield theirs, token_id
    ends, eos = keys_of(other), tokenizer.eos_ids
    yield from ((ends[end], eos[0]) for end in other.eos_ids if eos and end in ends)


@functools.lru_cache(maxsize=2)
def keys_of(tokenizer: Tokenizer) -> Mapping[int, Key]:
    """The key of each id."""
    special = {i: str(token) for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    added = {i: str(token) for i, token in tokenizer.backend.get_added_tokens_decoder().items() if not token.special}
    plain = bytes_by_letter() if is_byte_level(tokenizer) else None
    keys: dict[int, Key] = {}
    for token, i in tokenizer.vocabulary().items():
        if i in special:
            keys[i] = special[i]
        elif i in added:
            keys[i] = added[i].encode()
        elif plain is not None and all(letter in plain for letter in token):
            keys[i] = bytes(plain[letter] for letter in token)
        else:
            byte = BYTE.fullmatch(token)
            keys[i] = bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
    return keys


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokens are in GPT-2's letters for bytes."""
    decoder = tokenizer.backend.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
