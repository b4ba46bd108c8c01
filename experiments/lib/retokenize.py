"""How nearly do the tables that tokenise drafts again come to the target's own tokenizer?

Question:  A drafter of another vocabulary drafts a text from the end of one of the target's tokens on. Of the target's
           tokens of that text, how many are proposed before the first that is another?
Command:   python -m experiments.parity retokenize --target TARGET --drafter DRAFTER
Time:      a minute; no weights are read
Expected:  docs/drafters.md, "Text that is tokenised again"
Output:    a table: a line a way, a column a kind of text

Ways: the longest token that fits, again and again; the target's merges over the whole draft; merges within words, which
is what decoding does; and the target's tokenizer given the drafted text, which no table can beat. Both tokenizers are
read from .gguf files, folders or hub ids, whatever the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import check_least
from experiments.lib.prompts import load_prompts
from specdec_jax.contrib.retokenized.byte_pairs import Tables, retokenize
from specdec_jax.contrib.retokenized.merges import tables
from specdec_jax.loading import Tokenizer, outline
from specdec_jax.loading.gguf.reader import read_gguf
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf
from specdec_jax.loading.token_keys import ids_by_key, keys_of

Way = Callable[[Sequence[list[int]]], list[list[int]]]  # drafts -> the target's tokens


@dataclass(frozen=True)
class Retokenize:
    """Compare ways to tokenise drafts again."""

    target: str = "smollm2"
    """Whose tokens are wanted: a .gguf file, a folder, a hub id or a built-in name."""
    drafter: str = "smollm2"
    """Who drafts, as target."""
    prompts: tuple[str, ...] = tuple(
        f"configs/prompts/{name}.jsonl" for name in ("instructions", "math", "german", "code")
    )
    """Files of prompts, a column each."""
    drafts: int = 7
    """Tokens of the drafter in a draft."""
    samples: int = 200
    """Drafts a text."""


def compare(config: Retokenize, console: Console) -> None:
    """Prints the table. Raises ValueError, FileNotFoundError: bad input."""
    check_least(config, 1, "drafts", "samples")
    target, drafter = (  # of a .gguf file also where its model is of no family here
        tokenizer_from_gguf(read_gguf(source)) if source.endswith(".gguf") else outline(source).tokenizer
        for source in (config.target, config.drafter)
    )
    ways = ways_of(target, drafter, config.drafts)
    lines = [[way] for way in ways]
    for name in config.prompts:
        text = "\n".join(prompt.turns[0] for prompt in load_prompts(name))
        drafted, wanted = samples(target, drafter, text, config.drafts, config.samples)
        for line, again in zip(lines, ways.values(), strict=True):
            line.append(f"{sum(map(agreed, again(drafted), wanted)) / sum(map(len, wanted)):.2%}")
    console.print(markdown(["way", *(Path(name).stem for name in config.prompts)], lines))


def ways_of(target: Tokenizer, drafter: Tokenizer, drafts: int) -> dict[str, Way]:
    """By what the table calls them."""
    merges = tables(target, drafter, drafter.vocab_size)
    whole = merges._replace(splits=jnp.zeros_like(merges.splits))
    return {
        "longest": lambda texts: [longest(target, bytes_of(drafter, text)) for text in texts],
        "merges": by_tables(whole, drafts, target.vocab_size),
        "merges within words": by_tables(merges, drafts, target.vocab_size),
        "the tokenizer itself": lambda texts: [itself(target, bytes_of(drafter, text)) for text in texts],
    }


def samples(
    target: Tokenizer, drafter: Tokenizer, text: str, drafts: int, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """`count` drafts that begin where a token of the target's does, and the target's tokens that end within each."""
    tokens = target.encode(text)
    whole = bytes_of(target, tokens)
    ends = np.cumsum([len(bytes_of(target, [token])) for token in tokens])
    drafted, wanted = [], []
    for at in np.random.default_rng(0).integers(1, len(tokens) - 1, count):
        begin = int(ends[at - 1])
        rest = whole[begin : begin + 64 * drafts].decode(errors="ignore")
        draft = itself(drafter, rest.encode())[:drafts]
        drafted_bytes = bytes_of(drafter, draft)
        if whole[begin:].startswith(drafted_bytes):  # what begins in the middle of a character is left out
            inside = int(np.searchsorted(ends, begin + len(drafted_bytes), side="right"))
            drafted.append(draft)
            wanted.append(tokens[at:inside][:drafts])  # no more are proposed
    return drafted, wanted


def agreed(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Tokens that are the same, from the first on."""
    same = [token == other for token, other in zip(tokens, wanted, strict=False)]
    return same.index(False) if False in same else len(same)


def bytes_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """What tokens stand for."""
    keys = keys_of(tokenizer)
    keys_of_tokens = (keys[token] for token in tokens)
    return b"".join(key if isinstance(key, bytes) else key.encode() for key in keys_of_tokens)


def itself(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The tokenizer's tokens of a text that goes on: without the space that some put in front of a first word."""
    read = text.decode(errors="ignore")
    tokens = tokenizer.encode(read)
    if bytes_of(tokenizer, tokens) == read.encode():
        return tokens
    return [piece.id for piece in tokenizer.backend.model.tokenize(read.replace(" ", "\u2581"))]


def longest(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The longest token that fits, again and again."""
    ids, longest_key, tokens, at = ids_by_key(tokenizer), 32, [], 0
    while at < len(text):
        sizes = (size for size in range(min(longest_key, len(text) - at), 0, -1) if text[at : at + size] in ids)
        size = next(sizes, 0)
        if not size:
            break
        tokens.append(ids[text[at : at + size]])
        at += size
    return tokens


def by_tables(merges: Tables, drafts: int, vocab_size: int) -> Way:
    """As decoding does, with these tables."""
    again = jax.jit(retokenize, static_argnums=3)

    def way(texts: Sequence[list[int]]) -> list[list[int]]:
        tokens = np.zeros((len(texts), drafts), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        count = jnp.asarray([len(text) for text in texts], jnp.int32)
        tokens_again, sizes, _ = again(merges, jnp.asarray(tokens), count, vocab_size)
        return [row[:size].tolist() for row, size in zip(np.asarray(tokens_again), np.asarray(sizes), strict=True)]

    return way


main = command(Retokenize, compare, __doc__, "python -m experiments.parity retokenize")
