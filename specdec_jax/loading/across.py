"""Drafters for targets with another vocabulary, by one of two methods.

- `tokens`: proposes the common tokens only, as in drafters/draft_models/intersection.py;
- `text`: proposes all tokens of the drafter, and tokenises their text again, by contrib/retokenized. Used if the common
  tokens are a smaller share than `ENOUGH` of the target's, or if the drafter's source ends in `@text`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax.drafters.draft_models.intersection import shared_params, with_shared_tokens
from specdec_jax.loading.draft_vocabulary import TEXT, TOKENS, WAYS, split_source
from specdec_jax.loading.intersection import SAMPLE_TEXT, share_of, translation
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.types import DraftModel

RETOKENIZED = "specdec_jax.contrib.retokenized"
"""The module for `text`, imported on use."""
ENOUGH = 0.8
"""Minimum share of common tokens in a sample text for the method `tokens` (docs/drafters.md)."""
SHOWN = 3  # maximum number of tokens in a message


def for_target(target: Any, drafter: Any, report: Callable[[str], Any] | None = None) -> Any:
    """The drafter, a `LoadedModel`, translated to the target's token ids if the vocabularies differ.

    In that case `report` is called with a line on the method and the reason.

    Raises:
        ValueError: as `needs_translation` and `translate_vocabulary`.
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

    Raises:
        ValueError: fewer embeddings than tokens; if translation is needed, a drafter that reads its target or has a
            draft vocabulary, a model with an encoder, or `@text` with a target whose tokenizer is not BPE.
    """
    if same_tokens(target, drafter):
        return False
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

    Raises:
        ValueError: no token is shared, a drafter that cannot be translated (`with_shared_tokens`), or for `text` a
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


def same_tokens(target: Any, drafter: Any) -> bool:
    """Whether all common ids of two `LoadedModel`s stand for the same tokens; either may have further tokens.

    Raises ValueError for a model with fewer embeddings than tokens.
    """
    _check_embeddings(target, drafter)
    ours, theirs = ({i: token for token, i in side.tokenizer.vocabulary().items()} for side in (target, drafter))
    return all(ours[i] == theirs[i] for i in ours.keys() & theirs.keys())


def check_same_vocabulary(target: Any, drafter: Any) -> None:
    """Raises ValueError with the differences unless both `LoadedModel`s have the same ids for all tokens.

    Embeddings may be padded to different sizes; each must have a row for every token.
    """
    ours, theirs = target.tokenizer.vocabulary(), drafter.tokenizer.vocabulary()
    pair = f"target {target.name!r} and drafter {drafter.name!r}"
    if ours != theirs:
        ours, theirs = ({i: token for token, i in side.items()} for side in (ours, theirs))
        wrong = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        shown = "; ".join(f"token {i} is {_named(ours, i)} and {_named(theirs, i)}" for i in wrong[:SHOWN])
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


def _named(tokens: dict[int, str], i: int) -> str:
    return repr(tokens[i]) if i in tokens else "missing"
