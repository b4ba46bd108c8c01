"""Is another engine's speculative decoding lossless?

Question:  Do texts that transformers samples with assisted generation have the target's distribution? And where greedy
           texts differ from plain decoding's, is it rounding, or another choice?
Command:   python -m experiments.audit [--samples 4000] [--greedy 40]
Time:      about half an hour on one core, and some more to make the environment with torch, once
Expected:  docs/losslessness.md; only the control is biased; exit code 1 where another way of decoding is, or where the
           control is not found out
Output:    runs/audit-<time>/ with manifest.json, results.jsonl (a line a way of decoding), table.md and the models; a
           stopped run goes on with the same --out

A target of four tokens and its drafter are written in Hugging Face format. The distribution of four tokens after a
prompt is enumerated by this package from the same files, and the engine's samples are compared with it by chi-square:
the first token, the first two, and so on, the smallest p counting as often as there are tests. Sequences that are
expected fewer than five times are pooled. "Seen from" is the chi-square distance (the sum of (p - q)^2 / p) of a bias
that this many samples show in nine of ten runs, wherever it is. A greedy text that differs from plain
decoding's is rounding where the two tokens' logits are nearly the same there.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from scipy import optimize, stats

from experiments.lib.cells import markdown
from experiments.lib.commands import exit_codes, parsed, terminal
from experiments.lib.environments import BesideTorch, run_script
from experiments.lib.options import check_least
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.loading import load_model
from specdec_jax.lossless.sampled import chi_square

SIDE = Path(__file__).parent / "lib" / "peer_sides" / "audit_side.py"
CONTROL = "biased on purpose"
LEVEL = 1e-4  # significance level of one test; a run has about ten
NEAR = {"float32": 1e-3, "bfloat16": 0.1}  # a gap of logits that rounding may turn over


@dataclass(frozen=True)
class Audit(BesideTorch):
    """Sample another engine and compare with the exact distribution."""

    samples: int = 4000
    """Texts sampled each way."""
    greedy: int = 40
    """Greedy texts compared with plain decoding's."""

    def __post_init__(self) -> None:
        check_least(self, 1, "samples", "greedy")


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Samples and reports; 1 where something is biased that should not be, or the other way round."""
    return audit(parsed(Audit, __doc__, arguments), terminal())


def audit(config: Audit, console: Console) -> int:
    """Samples what is missing and writes the run folder."""
    if (python := config.python(console, "audited")) is None:
        return 0
    folder = RunFolder.create("audit", config, config.out)
    out = folder.path / "samples"
    out.mkdir(exist_ok=True)
    with console.status("Sampling with transformers"):
        run_script(python, SIDE, str(out), str(config.samples), str(config.greedy))
    sides = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    law = exact_law(out / "target", sides[0]["prompt"], sides[0]["vocab"], sides[0]["length"])
    rows = [judged(entry, law) for entry in sides]
    for row in rows:
        if row["method"] not in {written["method"] for written in folder.rows()}:
            folder.append(row)
    publish(folder, f"{sides[0]['versions']}, float32 on a CPU.\n\n{table(rows)}\n", console)
    wrong = [row["method"] for row in rows if row["biased"] != (row["method"] == CONTROL)]
    for method in wrong:
        console.print(f"{method}: {'not found to be biased' if method == CONTROL else 'biased'}", style="red")
    return 1 if wrong else 0


def exact_law(model: Path, prompt: Sequence[int], vocab: int, length: int) -> np.ndarray:
    """[vocab ** length] float64: the probability of every sequence of tokens after the prompt, by this package."""
    loaded = load_model(str(model), dtype="float32")
    sequences = np.array(list(itertools.product(range(vocab), repeat=length)), np.int32)
    tokens = np.concatenate([np.tile(np.array(prompt, np.int32), (len(sequences), 1)), sequences], axis=1)
    cache = loaded.model.init_cache(loaded.params, len(tokens), tokens.shape[1])
    logits, _ = loaded.model.apply(loaded.params, jnp.asarray(tokens), cache)
    places = slice(len(prompt) - 1, -1)
    log_prob = np.asarray(jax.nn.log_softmax(logits[:, places, :vocab], axis=-1), np.float64)
    return np.exp(np.take_along_axis(log_prob, sequences[..., None], axis=2).sum(axis=(1, 2)))


def judged(entry: dict[str, Any], law: np.ndarray) -> dict[str, Any]:
    """The verdict on one way of decoding."""
    if "error" in entry:
        return {"method": entry["method"], "biased": entry["method"] == CONTROL, "error": entry["error"]}
    counts, gaps = np.array(entry["counts"], float), entry["gaps"]
    tests = []  # for prefixes of length 1, 2, ...: a bias is clearest where it occurs
    for length in range(1, entry["length"] + 1):
        prefixes = [each.reshape(entry["vocab"] ** length, -1).sum(axis=1) for each in (counts, law)]
        statistic, degrees, p_value = chi_square(prefixes[0], prefixes[1] / prefixes[1].sum() * prefixes[0].sum())
        tests.append((p_value, statistic, degrees + 1, length))
    least, statistic, cells, length = min(tests)
    p_value = min(1.0, least * len(tests))
    turned = {dtype: [gap for gap in gaps[dtype] if gap > NEAR[dtype]] for dtype in gaps}
    return {
        "method": entry["method"],
        "samples": int(counts.sum()),
        "tokens": length,
        "cells": cells,
        "statistic": statistic,
        "p_value": p_value,
        "seen_from": smallest_seen(tests[-1][2] - 1, LEVEL / len(tests)) / counts.sum(),
        "greedy": entry["prompts"],
        "differ": {dtype: len(gaps[dtype]) for dtype in gaps},
        "largest_gap": {dtype: max(gaps[dtype], default=0.0) for dtype in gaps},
        "biased": p_value < LEVEL or any(turned.values()),
    }


def smallest_seen(degrees: int, level: float) -> float:
    """The noncentrality that a test at this level finds in nine of ten runs."""
    limit = stats.chi2.isf(level, degrees)
    return float(optimize.brentq(lambda shift: stats.ncx2.sf(limit, degrees, shift) - 0.9, 1e-3, 1e4))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One row per decoding method."""
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["method"], *["–"] * 5, f"does not run: {row['error'][:80]}"])
            continue
        test = f"{row['statistic']:.0f} / {row['cells'] - 1} ({row['tokens']})", f"{row['p_value']:.2g}"
        seen_from = f"{row['seen_from']:.3f}"
        greedy = [f"{row['differ'][d]} of {row['greedy']} (gap {row['largest_gap'][d]:.2g})" for d in NEAR]
        verdict = "biased" if row["biased"] else "lossless, as far as tested"
        cells.append([row["method"], *test, seen_from, *greedy, verdict])
    heads = ["decoding", "chi-square / degrees (tokens)", "p", "seen from", "greedy, float32: differ"]
    return markdown([*heads, "bfloat16: differ", "verdict"], cells)


if __name__ == "__main__":
    sys.exit(main())
