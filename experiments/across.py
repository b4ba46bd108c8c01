"""A drafter of another vocabulary: the tokens that both have, or its text tokenised again?

Question:  What is accepted, and how fast is decoding, by either way; and how few tokens must both have for the second?
Command:   python -m experiments.across --target google/gemma-3-270m-it --drafter smollm2 --no-chat
Time:      15 minutes on 2 cores
Expected:  docs/drafters.md, "Text that is tokenised again"
Output:    runs/across-<time>/ with manifest.json, results.jsonl (a line a way and prompt) and table.md

Ways: plain decoding; `text`; `tokens`; and `tokens` where both have only those of at most so many bytes (`--longest`),
as if the drafter had bytes or short pieces. Greedy, a fixed draft length. Prompt by prompt every way
decodes in turn, so that a slow moment of the machine meets all of them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import Output, check_least
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.compilation_cache import enable
from specdec_jax.loading import LoadedModel, load_pair, needs_translation, refuse_encoders
from specdec_jax.loading.across import TEXT, TOKENS, with_targets_tokens
from specdec_jax.loading.coverage import probability_shared
from specdec_jax.loading.intersection import SAMPLE_TEXT
from specdec_jax.loading.token_keys import ids_by_key, keys_of
from specdec_jax.models.intersection import shared_params
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.pair import Pair
from specdec_jax.text.sampling_params import SamplingParams

PLAIN = "plain"
COUNTS = ("num_rounds", "num_emitted_tokens", "num_draft_tokens", "num_accepted_tokens", "drafter_passes")


@dataclass(frozen=True)
class Across(Output):
    """Compare the two ways to draft across vocabularies."""

    target: str = "google/gemma-3-270m-it"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id."""
    drafter: str = "smollm2"
    """As target, with another vocabulary."""
    dtype: str = "bfloat16"
    """Of both models."""
    prompts: str = "configs/prompts/demo.jsonl"
    """A file of prompts."""
    limit: int = 6
    """Prompts."""
    chat: bool = True
    """Put prompts through the chat template."""
    max_new_tokens: int = 64
    """Tokens a prompt."""
    draft_length: int = 3
    """Drafter passes of a round."""
    longest: tuple[int, ...] = (8, 6, 5, 4, 3, 2, 1)
    """Bytes of the longest tokens that both are taken to have."""

    def __post_init__(self) -> None:
        check_least(self, 1, "limit", "max_new_tokens", "draft_length")


def compare(config: Across, console: Console) -> None:
    """Measures and writes. Raises ValueError, FileNotFoundError: bad input."""
    refuse_encoders("across", config.target, config.drafter)
    enable()
    with console.status("Loading the models"):
        target, drafter = load_pair(config.target, config.drafter, config.dtype)
    if not needs_translation(target, drafter):
        raise ValueError(f"{config.drafter} and {config.target} have one vocabulary")
    texts = [prompt.turns[0] for prompt in load_prompts(config.prompts, config.limit)]
    folder = RunFolder.create("across", config, config.out)
    ways = ways_of(config, target, drafter)
    rows = []
    for number, text in enumerate(texts, 1):
        for way, pair in ways.items():
            with console.status(f"{way}, prompt {number} of {len(texts)}"):
                rows.append({"way": way, "prompt": number, **decoded(config, pair, text)})
            folder.append(rows[-1])
    shares = {way: shares_of(pair) for way, pair in ways.items()}
    publish(folder, markdown(*table(rows, shares)) + "\n", console)


def ways_of(config: Across, target: LoadedModel, drafter: LoadedModel) -> dict[str, Pair]:
    """What is compared, by name."""
    found: dict[str, LoadedModel | None] = {PLAIN: None}
    found |= {way: with_targets_tokens(target, drafter, way) for way in (TEXT, TOKENS)}
    found |= {f"of {size} bytes": with_few(target, drafter, found[TOKENS], size) for size in config.longest}
    options: dict[str, Any] = {"policy": static(draft_length=config.draft_length), "costs": "estimated"}
    return {way: build_pair(target, one, max_draft_length=config.draft_length, **options) for way, one in found.items()}


def with_few(target: LoadedModel, drafter: LoadedModel, joined: Any, longest: int) -> LoadedModel:
    """The drafter as if both had only tokens of at most `longest` bytes."""
    own = np.full(target.model.spec.vocab_size, -1, np.int32)
    theirs, keys = ids_by_key(drafter.tokenizer), keys_of(target.tokenizer)
    for token in np.asarray(joined.params.tokens).tolist():
        key = keys[token]
        if isinstance(key, bytes) and len(key) <= longest and key in theirs:
            own[token] = theirs[key]
    params = joined.params
    return joined._replace(params=shared_params(drafter.model, drafter.params, own, params.pieces, params.count))


def shares_of(pair: Pair) -> tuple[float, float] | None:
    """Of a sample text's tokens, and of the target's probability along it, what the tokens that both have cover."""
    drafter = pair.params.drafter
    probability = probability_shared(pair.target, drafter)
    if probability is None:
        return None
    shared = set(np.asarray(drafter.tokens).tolist())
    tokens = pair.target.tokenizer.encode(SAMPLE_TEXT)
    return sum(token in shared for token in tokens) / len(tokens), probability


def decoded(config: Across, pair: Pair, text: str) -> dict[str, Any]:
    """Counts and seconds of one answer."""
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=0.0)
    found = generate(text, sampling, pair=pair, chat=config.chat)
    return {"seconds": found.seconds, **{name: found.statistics[name] for name in COUNTS}}


def table(
    rows: Sequence[dict[str, Any]], shares: dict[str, tuple[float, float] | None]
) -> tuple[list[str], list[list[str]]]:
    """(heads, lines): a line a way, totals over the prompts."""
    heads = ["way", "tokens of a text", "probability", "accepted of drafts", "tokens a round", "tokens/s", "speed-up"]
    sums = {
        way: {name: sum(row[name] for row in rows if row["way"] == way) for name in ("seconds", *COUNTS)}
        for way in shares
    }
    speeds = {way: found["num_emitted_tokens"] / found["seconds"] for way, found in sums.items()}
    lines = []
    for way, found in sums.items():
        both = shares[way]
        covered = ["–", "–"] if both is None else [f"{share:.0%}" for share in both]
        drafts = found["num_draft_tokens"]
        accepted = f"{found['num_accepted_tokens'] / drafts:.2f}" if drafts else "–"
        per_round = f"{found['num_emitted_tokens'] / found['num_rounds']:.2f}"
        lines.append([way, *covered, accepted, per_round, f"{speeds[way]:.1f}", f"{speeds[way] / speeds[PLAIN]:.2f}"])
    return heads, lines


main = command(Across, compare, __doc__)

if __name__ == "__main__":
    sys.exit(main())
