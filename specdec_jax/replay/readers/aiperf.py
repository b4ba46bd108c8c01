"""Acceptance per request as reported by vLLM (`--per-request-spec-decode-metrics detailed`) and in AIPerf's records.

A record is any JSON object with `per_step_accepted` and `per_step_drafted`, at any depth: a response's
`metrics.speculative_decoding`, a choice's `speculative_decoding_stats`, a line of AIPerf's profile_export.jsonl.
Records with a histogram only (`summary`) have no order of rounds; they are read if all drafts had the same length,
`num_draft_tokens` being `num_spec_tokens` times the rounds.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec_jax.replay.acceptance_log import StepLog, Steps, log_of_steps
from specdec_jax.text.json_lines import json_lines

ACCEPTED, DRAFTED, HISTOGRAM = "per_step_accepted", "per_step_drafted", "acceptance_histogram"


def load_aiperf(path: str | Path) -> StepLog:
    """The requests of a JSONL file. The first token of an answer comes from prefill and belongs to no round.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no record, or an inconsistent one; the message names file and line.
    """
    return log_of_records(((f"{path}:{number}", entry) for number, entry in json_lines(path)), str(path))


def log_of_records(entries: Iterable[tuple[str, Any]], source: str) -> StepLog:
    """As `load_aiperf`, from JSON values with the location of each."""
    requests, notes = [], set()
    for where, entry in entries:
        for record in records_in(entry):
            try:
                steps, ordered = steps_of(record, where)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"it lacks {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"{where}: no record of steps: {reason}") from None
            requests.append(steps)
            notes |= set() if ordered else {"rounds come as a histogram, in no order"}
    if not requests:
        raise ValueError(
            f"{source}: no request in it has {ACCEPTED}; vLLM writes it with --per-request-spec-decode-metrics detailed"
        )
    return log_of_steps(requests, {"drafter": "drafter", "source": source, "notes": sorted(notes)})


def records_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects in a JSON value that have steps or a histogram of them."""
    if isinstance(value, Mapping) and any(value.get(name) is not None for name in (ACCEPTED, HISTOGRAM)):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from records_in(part)


def steps_of(record: Mapping[str, Any], where: str) -> tuple[Steps, bool]:
    """The rounds of a record, and whether they are in order. Raises KeyError, TypeError, ValueError."""
    ordered = record.get(ACCEPTED) is not None
    if ordered:
        accepted = [int(count) for count in record[ACCEPTED]]
        drafted = [int(count) for count in record[DRAFTED]]
    else:
        histogram = record[HISTOGRAM]
        pairs = histogram.items() if isinstance(histogram, Mapping) else enumerate(histogram)
        accepted = [int(count) for count, rounds in pairs for _ in range(int(rounds))]
        longest = int(record["num_spec_tokens"])
        if int(record["num_draft_tokens"]) != longest * len(accepted):
            raise ValueError("draft lengths vary, and a histogram does not say which round had which")
        drafted = [longest] * len(accepted)
    for name, total in (("num_accepted_draft_tokens", sum(accepted)), ("num_draft_tokens", sum(drafted))):
        if record.get(name, total) != total:
            raise ValueError(f"{name} is {record[name]}, and the rounds add up to {total}")
    completion = record.get("completion_tokens")
    emitted = None if completion is None else max(int(completion) - 1, 0)
    return Steps(drafted, accepted, emitted, str(record.get("id", where))), ordered
