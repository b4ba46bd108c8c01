"""tools/record_torch.py against this package: the same weights along the same texts give the same trace."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.lib.environments import run_script
from specdec_jax.loading import load_model
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.replay.tracing import trace_texts

SCRIPT = Path(__file__).parents[2] / "tools" / "record_torch.py"
WARPS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
CHOICES = ("accepted", "candidate")  # differ by 0 or 1
SHARED = ("path", "overlap", "cross_entropy", "target_entropy", "raw_target_entropy")


def with_noise(model: Path, out: Path, share: float = 0.15) -> None:
    """A copy of a Hugging Face folder whose weights have noise of that share of their spread: most drafts are right."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    rng = np.random.default_rng(0)
    named = load_file(model / "model.safetensors")
    noisy = {n: a + rng.normal(0, share * a.std() + 1e-9, a.shape).astype(a.dtype) for n, a in named.items()}
    save_file(noisy, out / "model.safetensors", metadata={"format": "pt"})


def recorded_apart(python: Path, models: tuple[str, str], prompts: list[list[int]], out: Path) -> list[dict[str, Any]]:
    """Records target and drafter with torch, and again with this package along those texts: a row of `apart` a warp.

    Raises:
        OSError: the recorder failed; the message is its last line.
    """
    loaded = [load_model(source, dtype="float32") for source in models]
    out.mkdir(parents=True, exist_ok=True)
    (out / "prompts.jsonl").write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in prompts))
    rows = []
    for number, warp in enumerate(WARPS):
        folder = out / str(number)
        words = ["--target", models[0], "--drafter", models[1], "--prompts", str(out / "prompts.jsonl")]
        words += ["--out", str(folder), "--max-new-tokens", "24", "--max-draft-length", "6", "--device", "cpu"]
        words += ["--temperatures", f"{warp['temperature']:g}"]
        for name in warp.keys() - {"temperature"}:
            words += [f"--{name.replace('_', '-')}", f"{warp[name]:g}"]
        path = folder / f"trace-{warp['temperature']:g}.npz"
        if not path.exists():
            run_script(python, SCRIPT, *words)
        trace = load_trace(path)
        answers = [row[:length].tolist() for row, length in zip(trace.tokens, trace.length, strict=True)]
        ours = trace_texts(
            (loaded[0].model, loaded[1].model),
            (loaded[0].params, loaded[1].params),
            list(zip(prompts, answers, strict=True)),
            limit=24,
            warp=warp,
            max_draft_length=6,
        )
        name = "recorder, " + ", ".join(f"{key} {value:g}" for key, value in warp.items())
        rows.append({"model": name} | apart(trace, ours))
    return rows


def apart(first: Trace, other: Trace) -> dict[str, float]:
    """Largest differences of two traces along the same texts, of what does not depend on random numbers.

    Greedy traces agree in everything. Of sampled ones every bit is a draw, whose chance over texts is the overlap:
    "bits" is the distance of their sum from the overlaps' in standard deviations.
    """
    worst = {name: _largest(getattr(first, name), getattr(other, name)) for name in SHARED}
    here = _rejected(first)
    if float(first.temperature.max()) == 0:
        worst |= {name: float(np.max(getattr(first, name) != getattr(other, name))) for name in CHOICES}
        worst["tails"] = _largest(first.tails[first.tail_of[here]], other.tails[other.tail_of[here]])
    else:
        worst["tails"] = _largest(first.tails[first.tail_of[here], 0, :5], first.path[here][:, :5])
        within = np.arange(first.accepted.shape[1]) < first.length[:, None]
        chance = first.overlap[within].astype(float)
        spread = np.sqrt((chance * (1 - chance)).sum())
        worst["bits"] = float(abs(first.accepted[within].sum() - chance.sum()) / max(spread, 1e-9))
    return worst


def _rejected(trace: Trace) -> tuple[np.ndarray, ...]:
    return np.nonzero(~trace.accepted & (np.arange(trace.accepted.shape[1]) <= trace.length[:, None]))


def _largest(first: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; infinite where only one is finite."""
    same = (first == other) | (np.isnan(first) & np.isnan(other))
    gap = np.where(same, 0.0, np.abs(np.where(same, 0.0, first) - np.where(same, 0.0, other)))
    return float(np.nan_to_num(gap, nan=np.inf).max())
