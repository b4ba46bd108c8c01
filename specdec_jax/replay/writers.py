"""Export to other programs' formats: AIPerf's acceptance records, Spec-Bench's answers, synthetic acceptance.

Rounds are from a replay (`replay(..., record=True)`), or any lists of drafted and accepted tokens. Acceptance curves
are unconditional: entry i is the probability that the first i + 1 drafts are all accepted, as expected by both
`synthetic_acceptance_rates` of vLLM and `--spec-synth-rates` of llama.cpp.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.loading.new_folder import write_text
from specdec_jax.replay.acceptance_log import Steps
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import Trace
from specdec_jax.text.json_lines import json_text


def steps_of_replay(played: Replay, trace: Trace, setting: int = 0) -> list[Steps]:
    """The rounds of every text for one setting. Raises ValueError for a replay without a record."""
    if played.record is None:
        raise ValueError("a replay's rounds are written where it keeps them: replay(..., record=True)")
    ids = trace.about.get("ids") or list(map(str, range(trace.num_texts)))
    tasks = trace.about.get("tasks") or ["all"] * trace.num_texts
    steps = []
    for text, rounds in enumerate(played.record[setting]):
        drafted, accepted = rounds[rounds[:, 2] >= 0, :2].T.tolist()
        steps.append(Steps(drafted, accepted, int(played.emitted[setting, text]), str(ids[text]), str(tasks[text])))
    return steps


def aiperf_summary(
    histogram: Sequence[int], drafted: int, emitted: int, name: str = "", engine: str = "specdec_jax"
) -> dict[str, Any]:
    """AIPerf's acceptance record of a request, without its rounds; `histogram[i]` rounds accepted i tokens.

    `completion_tokens` is one more than the emitted tokens: in other engines the first token comes from prefill and
    belongs to no round.
    """
    rounds, total = int(sum(histogram)), int(sum(count * n for count, n in enumerate(histogram)))
    longest = len(histogram) - 1
    return {
        "engine": engine,
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


def aiperf_record(steps: Steps, engine: str = "specdec_jax") -> dict[str, Any]:
    """The same with every round, also in the format of vLLM's `speculative_decoding` block."""
    drafted, accepted = list(map(int, steps.drafted)), list(map(int, steps.accepted))
    histogram = np.bincount(accepted, minlength=max(drafted, default=0) + 1).tolist() if accepted else []
    emitted = sum(accepted) + len(accepted) if steps.emitted is None else steps.emitted
    summary = aiperf_summary(histogram, sum(drafted), emitted, steps.id, engine)
    return summary | {"per_step_accepted": accepted, "per_step_drafted": drafted}


def spec_bench_answer(steps: Steps, model: str, seconds: float) -> dict[str, Any]:
    """A line of a Spec-Bench answer file, without text; `seconds` is the decoding time of all rounds."""
    emitted = [count + 1 for count in steps.accepted]
    if steps.emitted is not None and emitted:
        emitted[-1] -= sum(emitted) - steps.emitted
    choice = {"index": 0, "turns": [""], "decoding_steps": [len(emitted)], "new_tokens": [sum(emitted)]}
    choice |= {"wall_time": [seconds], "accept_lengths": emitted}
    return {"question_id": steps.id, "category": steps.task, "model_id": model, "choices": [choice], "tstamp": 0.0}


def write_lines(path: str | Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSONL file atomically."""
    write_text(path, "".join(json_text(entry) + "\n" for entry in entries))


def acceptance_curve(requests: Sequence[Steps], length: int) -> list[float]:
    """The share of rounds with `length` drafts in which the first i + 1 were all accepted; non-increasing.

    Raises:
        ValueError: no such round.
    """
    rounds = [pair for request in requests for pair in zip(request.drafted, request.accepted, strict=True)]
    accepted = [count for drafted, count in rounds if drafted == length]
    if not accepted:
        raise ValueError(f"no round drafted {length} tokens")
    return [float(np.mean(np.asarray(accepted) > place)) for place in range(length)]


def synthetic_acceptance(rates: Sequence[float]) -> dict[str, str]:
    """The options of vLLM and llama.cpp for accepting drafts at these rates, independent of the models."""
    rounded = [round(rate, 4) for rate in rates]
    config = {"num_speculative_tokens": len(rates), "rejection_sample_method": "synthetic"}
    config["synthetic_acceptance_rates"] = rounded
    return {
        "vLLM": f"--speculative-config '{json.dumps(config)}'",
        "llama.cpp": f"--spec-draft-n-max {len(rates)} --spec-synth-rates {','.join(f'{rate:g}' for rate in rounded)}",
    }
