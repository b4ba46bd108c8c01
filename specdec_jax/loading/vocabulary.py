"""Whether two models speak of the same tokens."""

from typing import Any

SHOWN = 3


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
    for role, loaded in (("target", target), ("drafter", drafter)):
        if (rows := loaded.model.spec.vocab_size) <= max(ours.values()):
            raise ValueError(f"{role} {loaded.name!r} has {rows} embeddings for {max(ours.values()) + 1} tokens")


def _named(tokens: dict[int, str], i: int) -> str:
    return repr(tokens[i]) if i in tokens else "missing"
