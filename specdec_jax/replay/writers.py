"""Export to other programs: AIPerf's acceptance records, and JSONL files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.loading.new_folder import write_text
from specdec_jax.text.json_lines import json_text


def aiperf_summary(histogram: Sequence[int], drafted: int, emitted: int, name: str) -> dict[str, Any]:
    """AIPerf's acceptance record of a request, without its rounds; `histogram[i]` rounds accepted i tokens.

    `completion_tokens` is one more than the emitted tokens: in other engines the first token comes from prefill and
    belongs to no round.
    """
    rounds, total = int(sum(histogram)), int(sum(count * n for count, n in enumerate(histogram)))
    longest = len(histogram) - 1
    return {
        "engine": "specdec_jax",
        "mean_acceptance_length": 1 + total / max(rounds, 1),
        "draft_acceptance_rate": total / max(drafted, 1),
        "acceptance_histogram": {str(count): int(n) for count, n in enumerate(histogram) if n},
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": int(drafted),
        "num_spec_steps": rounds,
        "num_spec_tokens": longest if drafted == longest * rounds else None,
        "completion_tokens": int(emitted) + 1,
        "id": name,
    }


def write_lines(path: str | Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSONL file atomically."""
    write_text(path, "".join(json_text(entry) + "\n" for entry in entries))
