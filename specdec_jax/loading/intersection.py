"""The common tokens of two tokenizers, and the spelling of one's tokens by the other (drafters/draft_models/).

Tokens are compared by the bytes that they stand for, both byte-level ones (GPT-2's letters for bytes) and those of
SentencePiece (U+2581 for a space, <0x0A> for a byte); special tokens by their text and by their role.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.draft_models.intersection import SharedParams
from specdec_jax.loading.byte_tokenizer import bytes_by_letter
from specdec_jax.loading.token_keys import SPACE, Key, ids_by_key, ids_in, is_byte_level, keys_of
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.types import Array, LanguageModel, Params

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
    return float(_mean_probability(target.model, target.params, tokens, drafter.tokens))


@functools.partial(jax.jit, static_argnums=0)
def _mean_probability(model: LanguageModel, params: Params, tokens: Array, shared: Array) -> Array:
    """The mean [] over tokens [1, T] of the probability of the `shared` tokens [N]."""
    logits, _ = model.apply(params, tokens, model.init_cache(params, 1, tokens.shape[1]))
    return jnp.mean(jnp.sum(jax.nn.softmax(logits, axis=-1)[:, :, shared], axis=-1))


def translation(target: Tokenizer, drafter: Tokenizer, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(own [V], pieces [V, P], count [V]) int32 for the target's V = `rows` ids, the arguments of `shared_params`."""
    ids = ids_in(drafter, target)
    keys, spell, first = keys_of(target), _speller(drafter), set(ids_by_key(target).values())
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


def _speller(tokenizer: Tokenizer) -> Any:
    """A function from a key to the ids that spell it."""
    letters = {byte: letter for letter, byte in bytes_by_letter().items()}
    byte_level, vocabulary, model = is_byte_level(tokenizer), tokenizer.vocabulary(), tokenizer.backend.model
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
            ids = [vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(unknown or "")) for byte in key]
            return [piece for piece in ids if piece is not None]

    return spell
