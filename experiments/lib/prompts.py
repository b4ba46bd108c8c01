"""Prompts: from files, Spec-Bench's among them, every n-th of them, or sets of the hub by name."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from experiments.lib import datasets_by_name
from specdec_jax.text.prompt_file import Prompt, check_limit, of_split, prompt_of, read_prompts

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # categories
HALVES = ("calibrate", "judge")


def load_prompts(source: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, of `hub:NAME`, or of `hub:NAME@FILE`, a local copy; of `SOURCE:n` every n-th.

    The names, and how their rows become prompts, are in `lib/datasets_by_name.py`. `split` comes first, then every
    n-th, then `limit`, so no limit moves a prompt from one half to the other. A source without splits is halved for
    "calibrate" and "judge" by `with_halves`.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: what `read_prompts` and `datasets_by_name.entries` refuse, an n below 1, a split that is not there.
    """
    check_limit(limit)
    name, every = every_nth(str(source))
    if name.startswith(datasets_by_name.PREFIX):
        entries = datasets_by_name.entries(name)
        prompts = [prompt_of(entry, f"{name}, row {row}", default_id=str(row)) for row, entry in enumerate(entries)]
    else:
        prompts = read_prompts(name)
    if split in HALVES and all(prompt.split is None for prompt in prompts):
        prompts = with_halves(prompts)
    return of_split(prompts, split, name)[::every][:limit]


def every_nth(path: str) -> tuple[str, int]:
    """FILE:n as (FILE, n); a FILE alone means all of it. Raises ValueError for an n below 1."""
    name, colon, number = path.rpartition(":")
    if not colon or not number.isdigit():
        return path, 1
    if int(number) < 1:
        raise ValueError(f"every n-th prompt needs an n of 1 or more, got {path!r}")
    return name, int(number)


def with_halves(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The same prompts, those of each category put into "calibrate" and "judge" by turns, in the given order."""
    seen: Counter[str] = Counter()
    halved = []
    for prompt in prompts:
        halved.append(prompt._replace(split=HALVES[seen[prompt.category] % 2]))
        seen[prompt.category] += 1
    return halved
