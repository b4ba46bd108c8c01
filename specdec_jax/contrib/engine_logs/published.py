"""Published step costs as cost models by batch size, for advice without a measurement.

Two kinds. SpecDecode-Bench's simulator fits times of vLLM on an H100 to tokens and cache (arXiv 2601.11580). SpecBundle
(the SpecForge dashboard, 2026-08) gives throughputs and acceptance lengths of EAGLE-3 chains of 3, 5 and 7 drafts in
SGLang: the time of a round in passes of plain decoding is the acceptance length over the speed-up; it is fitted here by
`fixed + step * drafts` over its datasets, by least squares (for the errors see docs/advice.md).
"""

from typing import NamedTuple

from specdec_jax.costs.cost_model import CostModel, cost_model, load_cost_model
from specdec_jax.strategy import nearest

CONTEXT = 1024  # tokens in a row's cache, for the published fit
H100 = "llama-3.1-8b-eagle-h100"


class Fitted(NamedTuple):
    """A round of k > 0 drafts takes `fixed + step * k` passes of plain decoding, at one batch size."""

    batch: int
    fixed: float
    step: float
    longest: int = 7  # longest measured draft


SPECBUNDLE = {
    "llama-3.1-8b-eagle3-sglang": Fitted(1, 1.17, 0.066),
    "llama-3.3-70b-eagle3-sglang": Fitted(8, 1.12, 0.045),
    "qwen3-30b-a3b-eagle3-sglang": Fitted(8, 1.39, 0.100),
    "qwen3-coder-30b-a3b-eagle3-sglang": Fitted(8, 1.33, 0.104),
    "qwen3-235b-a22b-eagle3-sglang": Fitted(8, 1.48, 0.062),
    "qwen3-next-80b-a3b-eagle3-sglang": Fitted(8, 1.75, 0.089),
    "kimi-k2-eagle3-sglang": Fitted(8, 1.52, 0.155),
    "ling-flash-2.0-eagle3-sglang": Fitted(8, 1.43, 0.123),
}


def costs_named(words: str, batch: int | None = None, longest: int = 16) -> CostModel:
    """A published machine by name, numbers `c` or `c,slope`, or the file of a cost model.

    Args:
        words: of two numbers, c is the cost of a drafter step and slope that of another verified token of the batch,
            both in passes of plain decoding of one row.
        batch: number of rows decoded at once; default: that of the file or the published one.

    Raises:
        ValueError: an unknown name, numbers out of range, or a batch that differs from the published one or the file's.
        FileNotFoundError: no such file.
    """
    if words == H100:
        # vLLM with Llama-3.1-8B and an EAGLE head, fitted at batches of 1 to 64 and drafts of 1 to 5. Drafting has a
        # fixed time that hardly depends on the length, so it is counted in the verification pass.
        rows = batch or 1
        target = 5.886e-3 + 1.207e-3 + 3.926e-8 * CONTEXT * rows  # a pass and its overhead, and reading the cache
        token, drafting, draft = 2.101e-5 * rows, 2.135e-3 + 2.378e-9 * CONTEXT * rows, 8.41e-7
        passes = {1: target + token} | {width: target + drafting + token * width for width in range(2, 7)}
        return cost_model(draft, passes, device=f"H100, {H100}", batch=rows)
    if words in SPECBUNDLE:
        entry = SPECBUNDLE[words]
        _check_batch(words, batch, entry.batch)
        passes = {1: 1.0} | {drafts + 1: entry.fixed for drafts in range(1, entry.longest + 1)}
        return cost_model(entry.step, passes, device=words, batch=entry.batch)
    try:
        ratio, *slope = (float(part) for part in words.split(","))
    except ValueError:
        if not words.endswith(".json"):
            raise ValueError(f"no costs {words!r}{nearest(words, [H100, *SPECBUNDLE])}") from None
        model = load_cost_model(words)
        _check_batch(words, batch, model.batch)
        return model
    if not 0 <= ratio < 10 or len(slope) > 1 or not 0 <= sum(slope) < 10:
        raise ValueError(f"costs are c or c,slope, numbers from 0 to 10, got {words!r}")
    rows, extra = batch or 1, sum(slope)
    passes = {width: 1.0 + extra * (width * rows - 1) for width in range(1, longest + 2)}
    return cost_model(ratio, passes, batch=rows)


def _check_batch(words: str, batch: int | None, measured: int) -> None:
    if batch not in (None, measured):
        raise ValueError(f"the costs {words!r} were measured at a batch of {measured}, got {batch}")
