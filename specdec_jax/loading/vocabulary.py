"""Whether two models speak of the same tokens."""

from typing import Any

SHOWN = 3


def same_tokens(target: Any, drafter: Any) -> bool:
    """Whether no id means one token to one `LoadedModel` and another to the other; either may have tokens more.

    Raises ValueError for a model with fewer embeddings than tokens.
    """
    _check_embeddings(target, drafter)
    ours, theirs = ({i: token for token, i in side.tokenizer.vocabulary().items()} for side in (target, drafter))
    return all(ours[i] == theirs[i] for i in ours.keys() & theirs.keys())


def check_same_vocabulary(target: Any, drafter: Any) -> None:
    """Raises ValueError, saying how they differ, unless both `LoadedModel`s give every token the same id.

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
