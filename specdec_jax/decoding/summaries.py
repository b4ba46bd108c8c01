"""Metrics of finished rows on the host, from the counts and records of the decoding loop. Names as in vLLM."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax.types import DecodeState, Statistics


def recorded_rounds(state: DecodeState, row: int = 0, skipped: int = 0) -> list[dict[str, Any]]:
    """One row's rounds from index `skipped`, dicts of RoundInfo's fields as numpy values; needs `record_rounds`."""
    total = int(np.asarray(state.statistics.num_rounds)[row])
    assert state.record is not None, "the state was prefilled without record_rounds"
    if total > state.record[0].shape[1]:
        raise ValueError(f"row {row} had {total} rounds, and record_rounds is {state.record[0].shape[1]}")
    record = jax.tree.map(lambda leaf: np.asarray(leaf)[row, skipped:total], state.record)
    return [{name: getattr(record, name)[i] for name in record._fields} for i in range(total - skipped)]


def kinds_of(round_: Mapping[str, Any]) -> list[str]:
    """The kind of each emitted token of a recorded round: "accepted", "recovered" (replaces a rejected draft), "bonus".

    With trees, tokens accepted outside the chain, between its accepted drafts and the last token, are "branch".
    """
    accepted, drafted, emitted = (int(round_[name]) for name in ("accepted", "drafted", "emitted"))
    extra = max(0, emitted - accepted - 1)
    last = "bonus" if accepted == drafted or extra else "recovered"
    return [*["accepted"] * accepted, *["branch"] * extra, last][:emitted]


def summarise(counts: Statistics) -> dict[str, Any]:
    """Standard metrics over all rows of `counts`, as plain Python numbers and lists.

    `mean_acceptance_length` is 1 + accepted / drafts over rounds that drafted (including the bonus or recovered token);
    `mean_draft_length` and `acceptance_per_position` are over the same rounds, `conditional_acceptance_per_position`
    over those in which the position was evaluated. A metric without data is None.
    """
    total = jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0), counts)
    drafts, drafted, accepted = int(total.num_drafts), int(total.num_draft_tokens), int(total.num_accepted_tokens)
    return {
        **{name: int(count) for name, count in total._asdict().items() if count.ndim == 0},
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "mean_draft_length": _ratio(drafted, drafts),
        "mean_acceptance_length": None if drafts == 0 else 1 + accepted / drafts,
        "tokens_per_round": _ratio(int(total.num_emitted_tokens), int(total.num_rounds)),
        "discarded_fraction": _ratio(int(total.discarded_passes), int(total.drafter_passes)),
        "acceptance_per_position": [_ratio(int(a), drafts) for a in total.accepted_at],
        "conditional_acceptance_per_position": [
            _ratio(int(a), int(r)) for a, r in zip(total.accepted_at, total.evaluated_at, strict=True)
        ],
        "acceptance_histogram": [int(n) for n in total.length_histogram],
    }


def _ratio(part: int, whole: int) -> float | None:
    return None if whole == 0 else part / whole
