"""Drafters for targets with another vocabulary, by one of two methods.

- `tokens`: proposes the common tokens only, as in drafters/draft_models/intersection.py;
- `text`: proposes all tokens of the drafter, and tokenises their text again, by contrib/retokenized. Used if the common
  tokens are a smaller share than `ENOUGH` of the target's, or if the drafter's source ends in `@text`.

Tokens are compared by the bytes that they stand for, both byte-level ones (GPT-2's letters for bytes) and those of
SentencePiece (U+2581 for a space, <0x0A> for a byte); special tokens by their text and by their role.
"""

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.draft_models.intersection import SharedParams, shared_params, with_shared_tokens
from specdec_jax.loading.draft_vocabulary import TEXT, TOKENS, WAYS, split_source
from specdec_jax.loading.tokenizer import ROLES, Tokenizer, bytes_by_letter
from specdec_jax.types import Array, DraftModel, Params

SPACE = "\u2581"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Key = bytes | str  # the bytes that a token stands for; for special tokens their text


def ids_in(tokenizer: Tokenizer, other: Tokenizer) -> dict[Key, int]:
    """The tokenizer's id for every key; special tokens that only the other one has are matched by role (`ROLES`)."""
    both = [role for role in ROLES if role in other.special and role in tokenizer.special]
    matched = {other.special[role]: tokenizer.backend.token_to_id(tokenizer.special[role]) for role in both}
    ids: dict[Key, int] = {text: token for text, token in matched.items() if token is not None}
    ends, eos = keys_of(other), tokenizer.eos_ids
    return {**ids, **{ends[end]: eos[0] for end in other.eos_ids if eos and end in ends}, **ids_by_key(tokenizer)}


@functools.lru_cache(maxsize=2)  # for a pair; a quarter of a million tokens take a second
def ids_by_key(tokenizer: Tokenizer) -> Mapping[Key, int]:
    """The id for every key; if there are several the first, and bytes by number (<0x68>) last."""
    by_number = {token for text, token in tokenizer.vocabulary().items() if BYTE.fullmatch(text)}
    keys = sorted(keys_of(tokenizer).items(), key=lambda item: (item[0] in by_number, item[0]), reverse=True)
    return {key: token for token, key in keys}


@functools.lru_cache(maxsize=2)
def keys_of(tokenizer: Tokenizer) -> Mapping[int, Key]:
    """The key of each id."""
    added = tokenizer.backend.get_added_tokens_decoder()
    plain = bytes_by_letter() if is_byte_level(tokenizer) else None
    keys: dict[int, Key] = {}
    for token, i in tokenizer.vocabulary().items():
        if i in added:
            keys[i] = str(added[i]) if added[i].special else str(added[i]).encode()
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


MOST_PIECES = 8  # longer spellings are truncated to their last pieces

SAMPLE_TEXT = """The committee met on 14 March 2019 to decide how the money should be spent. "It isn't enough," she
said, and left.
def total(items):
    return sum(item.price * item.count for item in items)  # in euros
El informe fue publicado ayer; les résultats sont encourageants, und die Zahlen stimmen. f(x) = 3x² + 2
"""


def share_of(target: Tokenizer, drafter: Tokenizer, text: str) -> float:
    """The share of the target's tokens of a text that the drafter also has."""
    drafter_keys = set(ids_by_key(drafter))
    keys = keys_of(target)
    tokens = target.encode(text)
    return sum(keys.get(token) in drafter_keys for token in tokens) / max(len(tokens), 1)


def probability_shared(target: Any, drafter: Any) -> float | None:
    """The target's probability of the common tokens at temperature 1, averaged over a sample text.

    Takes one pass of the target, a `LoadedModel`. None if `drafter`, its parameters, has the target's vocabulary.
    """
    if not isinstance(drafter, SharedParams):
        return None
    tokens = jnp.asarray([target.tokenizer.encode(SAMPLE_TEXT, add_special=True)], jnp.int32)

    @jax.jit
    def mean(params: Params, shared: Array) -> Array:
        logits, _ = target.model.apply(params, tokens, target.model.init_cache(params, 1, tokens.shape[1]))
        return jnp.mean(jnp.sum(jax.nn.softmax(logits, axis=-1)[:, :, shared], axis=-1))

    return float(mean(target.params, drafter.tokens))


def translation(target: Tokenizer, drafter: Tokenizer, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(own [V], pieces [V, P], count [V]) int32 for the target's V = `rows` ids, the arguments of `shared_params`."""
    ids, keys, first = ids_in(drafter, target), keys_of(target), set(ids_by_key(target).values())
    letters = {byte: letter for letter, byte in bytes_by_letter().items()}
    byte_level, vocabulary, model = is_byte_level(drafter), drafter.vocabulary(), drafter.backend.model
    unknown = drafter.special.get("unk_token") or drafter.special.get("eos_token")

    def spell(key: Key) -> list[int]:
        """The ids that spell a key without an id."""
        if isinstance(key, str):
            return drafter.backend.encode(key, add_special_tokens=False).ids
        try:
            surface = "".join(letters[byte] for byte in key) if byte_level else key.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            spelled = [vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(unknown or "")) for byte in key]
            return [piece for piece in spelled if piece is not None]
        return [piece.id for piece in model.tokenize(surface)] if surface else []

    drafter_ids, pieces = np.full(rows, -1, np.int32), np.zeros((rows, MOST_PIECES), np.int32)
    count = np.ones(rows, np.int32)
    for token, key in keys.items():
        if token >= rows:
            continue
        if key in ids and token in first:  # one of two tokens with the same bytes is drafted
            drafter_ids[token] = ids[key]
        spelled = [ids[key]] if key in ids else spell(key)[-MOST_PIECES:] or [0]
        pieces[token, : len(spelled)], count[token] = spelled, len(spelled)
    return drafter_ids, pieces[:, : int(count.max())], count


RETOKENIZED = "specdec_jax.contrib.retokenized"
"""The module for `text`, imported on use."""
ENOUGH = 0.8
"""Minimum share of common tokens in a sample text for the method `tokens` (docs/drafters.md)."""
SHOWN = 3  # maximum number of tokens in a message


def for_target(target: Any, drafter: Any, report: Callable[[str], Any] | None = None) -> Any:
    """The drafter, a `LoadedModel`, translated to the target's token ids if the vocabularies differ.

    In that case `report` is called with a line on the method and the reason. Raises ValueError: as `needs_translation`
    and `translate_vocabulary`.
    """
    if not needs_translation(target, drafter):
        return drafter
    way = way_for(target, drafter)
    joined = translate_vocabulary(target, drafter, way)
    if report is not None:
        how = describe_join(way, target.tokenizer, drafter.tokenizer, joined.params.tokens.size)
        report(f"{drafter.name} has another vocabulary than {target.name}: {how}")
    return joined


def needs_translation(target: Any, drafter: Any) -> bool:
    """Whether an id stands for different tokens in target and drafter.

    Raises ValueError: fewer embeddings than tokens; if translation is needed, a drafter that reads its target or has a
    draft vocabulary, a model with an encoder, or `@text` with a target whose tokenizer is not BPE.
    """
    _check_embeddings(target, drafter)
    ours, theirs = ({i: token for token, i in side.tokenizer.vocabulary().items()} for side in (target, drafter))
    if all(ours[i] == theirs[i] for i in ours.keys() & theirs.keys()):
        return False  # all common ids stand for the same tokens; either may have further ones
    encoders = any(loaded.model.spec.source is not None for loaded in (target, drafter))
    if encoders or isinstance(drafter.model, DraftModel):
        check_same_vocabulary(target, drafter)
    if asked_for(drafter) == TEXT:
        try:
            importlib.import_module(RETOKENIZED).check_target(target.tokenizer)
        except ValueError as error:
            pair = f"drafter {drafter.name!r} for target {target.name!r}"
            raise ValueError(f"{pair}: {error}; @tokens drafts the tokens that both have") from None
    return True


def way_for(target: Any, drafter: Any) -> str:
    """`tokens` or `text`: as specified by the drafter's source, or by the vocabularies."""
    if way := asked_for(drafter):
        return way
    few = share_of(target.tokenizer, drafter.tokenizer, SAMPLE_TEXT) < ENOUGH
    return TEXT if few and importlib.import_module(RETOKENIZED).is_bpe(target.tokenizer) else TOKENS


def asked_for(drafter: Any) -> str:
    """The method specified at the end of the drafter's source, or an empty string."""
    suffix = split_source(drafter.name)[1]
    return suffix if suffix in WAYS else ""


def describe_join(way: str, target: Tokenizer, drafter: Tokenizer, count: int | None = None) -> str:
    """A description of the method and the number of common tokens (`count`, if already known)."""
    count = int((translation(target, drafter, target.vocab_size)[0] >= 0).sum()) if count is None else count
    both = f"{count:,} tokens that both have, {share_of(target, drafter, SAMPLE_TEXT):.0%} of those of a sample text"
    return f"it drafts the {both}" if way == TOKENS else f"what it drafts is tokenised again, not only the {both}"


def translate_vocabulary(target: Any, drafter: Any, way: str) -> Any:
    """The drafter, a `LoadedModel`, in the target's token ids, by `tokens` or by `text`.

    Raises ValueError: no token is shared, a drafter that cannot be translated (`with_shared_tokens`), or for `text` a
    target whose tokenizer is not BPE.
    """
    rows, own_rows = target.model.spec.vocab_size, drafter.model.spec.vocab_size
    drafter_ids, pieces, count = translation(target.tokenizer, drafter.tokenizer, rows)
    drafter_ids = np.where(drafter_ids < own_rows, drafter_ids, -1)
    try:
        model = with_shared_tokens(drafter.model, rows)
        params = shared_params(drafter.model, drafter.params, drafter_ids, pieces, count)
        shared = drafter._replace(model=model, params=params, tokenizer=target.tokenizer)
        if way == TEXT:
            return importlib.import_module(RETOKENIZED).with_text(target, drafter, shared)
    except ValueError as error:
        raise ValueError(f"drafter {drafter.name!r} for target {target.name!r}: {error}") from None
    return shared


def check_same_vocabulary(target: Any, drafter: Any) -> None:
    """Raises ValueError with the differences unless both `LoadedModel`s have the same ids for all tokens.

    Embeddings may be padded to different sizes; each must have a row for every token.
    """
    ours, theirs = target.tokenizer.vocabulary(), drafter.tokenizer.vocabulary()
    pair = f"target {target.name!r} and drafter {drafter.name!r}"
    if ours != theirs:
        ours, theirs = ({i: repr(token) for token, i in side.items()} for side in (ours, theirs))
        both = [(i, ours.get(i, "missing"), theirs.get(i, "missing")) for i in sorted(ours.keys() | theirs.keys())]
        wrong = [f"token {i} is {first} and {other}" for i, first, other in both if first != other]
        shown = "; ".join(wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(
            f"{pair} have different vocabularies, of {len(ours)} and {len(theirs)} tokens: {shown}{more}. "
            "A drafter proposes token ids, so both must mean the same by them"
        )
    _check_embeddings(target, drafter)


def _check_embeddings(target: Any, drafter: Any) -> None:
    """Raises ValueError unless both have a row for each of their tokens."""
    for role, loaded in (("target", target), ("drafter", drafter)):
        needed = max(loaded.tokenizer.vocabulary().values()) + 1
        if (rows := loaded.model.spec.vocab_size) < needed:
            raise ValueError(f"{role} {loaded.name!r} has {rows} embeddings for {needed} tokens")
