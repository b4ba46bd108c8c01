"""Which tokens two tokenizers share, and how one spells the tokens of the other (models/intersection.py).

Tokens are compared by the bytes that they stand for: byte-level ones (GPT-2's letters for bytes) and those of
SentencePiece (U+2581 for a space, <0x0A> for a byte) alike; special tokens by their text and by their role.
"""

import functools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from specdec_jax.loading.tokenizer import ROLES, Tokenizer
from specdec_jax.loading.vocabulary import check_same_vocabulary, same_tokens
from specdec_jax.models.intersection import shared_params, with_shared_tokens

MOST_PIECES = 8  # a token that is spelled longer is read as its last pieces
SPACE = "\u2581"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")

SAMPLE_TEXT = """The committee met on 14 March 2019 to decide how the money should be spent. "It isn't enough," she
said, and left.
def total(items):
    return sum(item.price * item.count for item in items)  # in euros
El informe fue publicado ayer; les résultats sont encourageants, und die Zahlen stimmen. f(x) = 3x² + 2
"""

Key = bytes | str  # what a token stands for; of special ones their text


def for_target(target: Any, drafter: Any) -> Any:
    """The drafter, a `LoadedModel`, as it is, or in the target's tokens if an id means another token to it.

    Then a line on standard error says what both have.

    Raises:
        ValueError: fewer embeddings than tokens, no token in common, or a drafter that cannot be translated.
    """
    if not needs_translation(target, drafter):
        return drafter
    joined = with_shared_vocabulary(target, drafter)
    told = what_both_have(target.tokenizer, drafter.tokenizer, joined.params.tokens.size)
    print(
        f"specdec_jax: {drafter.name} has another vocabulary than {target.name}: it drafts the {told}", file=sys.stderr
    )
    return joined


def what_both_have(target: Tokenizer, drafter: Tokenizer, count: int | None = None) -> str:
    """In words; `count` tokens, where they are counted already."""
    count = int((translation(target, drafter, target.vocab_size)[0] >= 0).sum()) if count is None else count
    return f"{count:,} tokens that both have, {share_of(target, drafter, SAMPLE_TEXT):.0%} of those of a sample text"


def needs_translation(target: Any, drafter: Any) -> bool:
    """Whether an id means one token to the target and another to the drafter.

    Raises:
        ValueError: fewer embeddings than tokens; and where it does, a drafter that reads its target or has a draft
            vocabulary, or a model with an encoder.
    """
    if same_tokens(target, drafter):
        return False
    encoders = any(one.model.spec.source is not None for one in (target, drafter))
    if encoders or drafter.model.reduced is not None or drafter.model.reading is not None:
        check_same_vocabulary(target, drafter)
    return True


def with_shared_vocabulary(target: Any, drafter: Any) -> Any:
    """The drafter, a `LoadedModel`, in the target's token ids: it proposes the tokens that both have.

    Raises:
        ValueError: no token is shared, or a drafter that cannot be translated (`with_shared_tokens`).
    """
    own, pieces, count = translation(target.tokenizer, drafter.tokenizer, target.model.spec.vocab_size)
    own = np.where(own < drafter.model.spec.vocab_size, own, -1)
    try:
        model = with_shared_tokens(drafter.model, target.model.spec.vocab_size)
        params = shared_params(drafter.model, drafter.params, own, pieces, count)
    except ValueError as error:
        raise ValueError(f"drafter {drafter.name!r} for target {target.name!r}: {error}") from None
    return drafter._replace(model=model, params=params, tokenizer=target.tokenizer)


def share_of(target: Tokenizer, drafter: Tokenizer, text: str) -> float:
    """Of the target's tokens of a text, the share that the drafter has too."""
    known = set(_by_key(drafter))
    keys = _keys(target)
    tokens = target.encode(text)
    return sum(keys.get(token) in known for token in tokens) / max(len(tokens), 1)


def translation(target: Tokenizer, drafter: Tokenizer, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(own [V], pieces [V, P], count [V]) int32 for the target's V = `rows` ids, as `shared_params` takes them."""
    ids = dict(_by_role(target, drafter)) | _by_key(drafter)
    keys, spell, first = _keys(target), _speller(drafter), set(_by_key(target).values())
    own, pieces = np.full(rows, -1, np.int32), np.zeros((rows, MOST_PIECES), np.int32)
    count = np.ones(rows, np.int32)
    for token, key in keys.items():
        if token >= rows:
            continue
        if key in ids and token in first:  # of two tokens that stand for the same one is drafted
            own[token] = ids[key]
        spelled = [ids[key]] if key in ids else spell(key)[-MOST_PIECES:] or [0]
        pieces[token, : len(spelled)], count[token] = spelled, len(spelled)
    return own, pieces[:, : int(count.max())], count


def _by_key(tokenizer: Tokenizer) -> dict[Key, int]:
    """The id of everything that a token stands for: of several the first, a byte by its number (<0x68>) last."""
    by_number = {token for text, token in tokenizer.vocabulary().items() if BYTE.fullmatch(text)}
    keys = sorted(_keys(tokenizer).items(), key=lambda item: (item[0] in by_number, item[0]), reverse=True)
    return {key: token for token, key in keys}


def _by_role(target: Tokenizer, drafter: Tokenizer) -> Iterator[tuple[Key, int]]:
    """The target's special tokens that the drafter has by another name: beginning, end, padding, unknown."""
    for role in ROLES:
        theirs, ours = target.special.get(role), drafter.special.get(role)
        own = None if ours is None else drafter.backend.token_to_id(ours)
        if theirs is not None and own is not None:
            yield theirs, own
    ends, own = _keys(target), drafter.eos_ids
    yield from ((ends[end], own[0]) for end in target.eos_ids if own and end in ends)


def _keys(tokenizer: Tokenizer) -> dict[int, Key]:
    """What each id stands for."""
    special = {i: str(token) for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    added = {i: str(token) for i, token in tokenizer.backend.get_added_tokens_decoder().items() if not token.special}
    plain = _bytes_by_letter() if _is_byte_level(tokenizer) else None
    found: dict[int, Key] = {}
    for token, i in tokenizer.vocabulary().items():
        if i in special:
            found[i] = special[i]
        elif i in added:
            found[i] = added[i].encode()
        elif plain is not None and all(letter in plain for letter in token):
            found[i] = bytes(plain[letter] for letter in token)
        else:
            byte = BYTE.fullmatch(token)
            found[i] = bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
    return found


def _speller(tokenizer: Tokenizer) -> Any:
    """key -> the ids that spell it."""
    letters = {byte: letter for letter, byte in _bytes_by_letter().items()}
    byte_level, vocabulary, model = _is_byte_level(tokenizer), tokenizer.vocabulary(), tokenizer.backend.model
    unknown = tokenizer.special.get("unk_token") or tokenizer.special.get("eos_token")

    def pieces(surface: str) -> list[int]:
        return [piece.id for piece in model.tokenize(surface)] if surface else []

    def spell(key: Key) -> list[int]:
        if isinstance(key, str):
            return tokenizer.backend.encode(key, add_special_tokens=False).ids
        if byte_level:
            return pieces("".join(letters[byte] for byte in key))
        try:
            return pieces(key.decode().replace(" ", SPACE))
        except UnicodeDecodeError:
            found = [vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(unknown or "")) for byte in key]
            return [one for one in found if one is not None]

    return spell


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return '"ByteLevel"' in json.dumps(json.loads(tokenizer.backend.to_str()).get("decoder"))


@functools.cache
def _bytes_by_letter() -> dict[str, int]:
    """GPT-2's letter of every byte: printable ones are themselves, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
