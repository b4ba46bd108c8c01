"""Do the families give the logits that transformers gives on torch?

Question:  Of small random models of every family, written as the hub has them, and of any model by --models: how far
           are the logits from those of transformers on torch, both in float32? And do traces of record_torch.py
           (docs/examples) agree with this package's along the same texts?
Command:   python -m experiments.parity [--models HuggingFaceTB/SmolLM2-135M ./folder]    (make parity)
Time:      six minutes on 2 cores, and some more to make the environment with torch, once
Expected:  every row under 1e-4 of the largest logit; exit code 1 where one is not
Output:    runs/parity-<time>/, with the models themselves; results.jsonl has a line a model

The random models are written twice: in float32 as one file, in bfloat16 as several (the index names them). One pass of
20 tokens, and the last position by itself behind a cache. --reference writes the file that tests/models/test_models.py
compares with where there is no torch.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from safetensors.numpy import load_file, save_file

from experiments.lib.commands import Output, command
from experiments.lib.engines import Failed, python_of, run
from experiments.lib.parity_side.cases import CASES, POSITIONS, TOKENS, slug
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import Whole, markdown, publish
from specdec_jax.loading import load_model
from specdec_jax.loading.new_folder import write_text
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.replay.tracing import trace_texts

SIDE = Path(__file__).parent / "lib" / "parity_side" / "logits.py"
NEAR = 1e-4  # tolerance relative to the largest logit; also for statistics in nats and probabilities
RECORDED = "llama float32"  # the small model that is traced, with its own weights and noise as the drafter
LIKELY = 4  # standard deviations
SLOTS = 32
MOST_SECONDS = 3600  # for a script in the environment with torch
SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "record_torch.py"
WARPS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
CHOICES = ("accepted", "candidate")  # differ by 0 or 1
SHARED = ("path", "overlap", "cross_entropy", "target_entropy", "raw_target_entropy")


@dataclass(frozen=True)
class Parity(Output):
    """Compare logits with those of transformers."""

    models: tuple[str, ...] = ()  # Hub ids or folders; none: small random models of every family.
    reference: str | None = None
    """Also write the logits of the small models to this file, as tests/data/family_logits.json has them."""
    recorder: bool = False  # Compare traces of --models TARGET DRAFTER instead of logits.
    environments: str = "runs/environments"  # Folder of the environment with torch.
    install_seconds: float = 3600.0  # Most time for making it.

    def __post_init__(self) -> None:
        if self.recorder and len(self.models) != 2:
            raise ValueError(f"--recorder compares traces of --models TARGET DRAFTER, got {self.models}")
        if self.models and self.reference:
            raise ValueError(f"--reference is of the small models, and --models asks for {self.models[0]!r}")


def parity(config: Parity, console: Console) -> int:
    """Compares what is missing and writes the run folder; 1 where logits differ."""
    where, names = Path(config.environments), ("torch", "transformers")
    try:
        with console.status("The environment with torch"):
            python = python_of("requirements-peers.txt", where, seconds=config.install_seconds, packages=names)
    except Failed as error:
        console.print(f"Nothing is compared: {error}", style="yellow")
        return 0
    folder = RunFolder.create("parity", config, config.out)
    if config.recorder:
        return _report_traces(folder, python, (config.models[0], config.models[1]), console)
    out = folder.path / "models"
    with console.status("Logits by transformers on torch"):
        run([str(python), str(SIDE), str(out), *config.models], SIDE.name, MOST_SECONDS)
    theirs = {path.parent.name: np.load(path) for path in sorted(out.glob("*/logits.npz"))}
    compared = {row["model"]: row for row in folder.rows()}
    sources = {slug(model): model for model in config.models}
    for name, logits in theirs.items():
        if name not in compared:
            with console.status(name):
                compared[name] = {"model": name} | _compared(sources.get(name, str(out / name)), logits)
            folder.append(compared[name])
    rows = [compared[name] for name in theirs]
    cells = [[row["model"], row["model_type"], f"{row['pass']:.1e}", f"{row['cached']:.1e}"] for row in rows]
    note = "Largest difference from transformers on torch, over the largest logit.\n\n"
    publish(folder, note + markdown(["model", "family", "a pass", "a token behind a cache"], cells) + "\n", console)
    if config.reference:  # logits of the float32 models at some positions, and how their weights are made
        question = "import torch, transformers; print(transformers.__version__, torch.__version__.split('+')[0])"
        printed = subprocess.run([str(python), "-c", question], capture_output=True, text=True, check=True).stdout
        head = {"made_by": "transformers {}, torch {}, float32".format(*printed.split()), "tokens": TOKENS}
        lines = []
        for place in sorted(out.glob("*-float32")):
            model, shapes = (json.loads((place / f"{name}.json").read_text()) for name in ("config", "shapes"))
            logits = np.load(place / "logits.npz")["logits"][:, list(POSITIONS)].astype(np.float64)
            case = {"config": model, "shapes": shapes, "logits": np.round(logits, 5).tolist()}
            lines.append(f"  {json.dumps(place.name)}: {json.dumps(case)}")
        if len(lines) != len(CASES):
            raise OSError(f"{out} has {len(lines)} of {len(CASES)} small models")
        text = json.dumps(head | {"positions": list(POSITIONS)})[:-1] + ', "cases": {\n' + ",\n".join(lines) + "\n}}\n"
        write_text(Path(config.reference), text)
    far = [row["model"] for row in rows if not max(row["pass"], row["cached"]) < NEAR]
    for name in far:
        console.print(f"{name} differs by more than {NEAR} of its largest logit", style="red")
    if config.models:
        return 1 if far else 0
    target, drafter = out / slug(RECORDED), folder.path / "drafter"
    # Weights with noise of 0.15 of their spread: most drafts are right.
    shutil.copytree(target, drafter, dirs_exist_ok=True)
    named, rng = load_file(target / "model.safetensors"), np.random.default_rng(0)
    noisy = {n: a + rng.normal(0, 0.15 * a.std() + 1e-9, a.shape).astype(a.dtype) for n, a in named.items()}
    save_file(noisy, drafter / "model.safetensors", metadata={"format": "pt"})
    return max(_report_traces(folder, python, (str(target), str(drafter)), console), int(bool(far)))


def _report_traces(folder: RunFolder, python: Path, models: tuple[str, str], console: Console) -> int:
    """Compares the recorder's traces with ours, prints a table; 1 where they differ."""
    with console.status("Traces by torch"):
        rows = recorded_apart(python, models, TOKENS, folder.path / "recorder")
    names = list(dict.fromkeys(name for row in rows for name in row if name != "model"))
    cells = [[row["model"], *(f"{row[name]:.1e}" if name in row else "–" for name in names)] for row in rows]
    text = "Largest differences between traces of docs/examples/record_torch.py and ours along the same texts.\n\n"
    text += markdown(["", *names], cells) + "\n"
    write_text(folder.path / "traces.md", text)
    console.print(Whole(text))
    limits = {name: LIKELY if name == "bits" else NEAR for name in names}
    far = [row["model"] for row in rows if not all(row.get(name, 0) < limits[name] for name in names)]
    for name in far:
        console.print(f"{name}: traces differ", style="red")
    return 1 if far else 0


def _compared(source: str, theirs: Any) -> dict[str, Any]:
    """Largest differences of the logits, over the largest logit: of one pass, and of the last token behind a cache."""
    loaded = load_model(source, dtype="float32")
    tokens, logits = jnp.asarray(theirs["tokens"], jnp.int32), theirs["logits"]
    apply, size = jax.jit(loaded.model.apply), float(np.abs(logits).max())
    with jax.default_matmul_precision("highest"):
        source = tuple(jnp.asarray(theirs[name], jnp.int32) for name in ("source", "source_length") if name in theirs)
        cache = loaded.model.init_cache(loaded.params, len(tokens), SLOTS, source or None)
        ours, cache = apply(loaded.params, tokens, cache)
        cache = loaded.model.with_length(cache, cache.length - 1)
        last, _ = apply(loaded.params, tokens[:, -1:], cache)
    vocab = logits.shape[-1]
    return {
        "model_type": loaded.config.model_type,
        "pass": float(np.abs(ours[..., :vocab] - logits).max()) / size,
        "cached": float(np.abs(last[:, 0, :vocab] - logits[:, -1]).max()) / size,
    }


def recorded_apart(python: Path, models: tuple[str, str], prompts: list[list[int]], out: Path) -> list[dict[str, Any]]:
    """Records the pair with torch, and with this package along those texts: a row of `apart` a warp. Raises Failed."""
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
            run([str(python), str(SCRIPT), *words], SCRIPT.name, MOST_SECONDS)
        trace = load_trace(path)
        answers = [row[:length].tolist() for row, length in zip(trace.tokens, trace.length, strict=True)]
        models_of, params = zip(*((each.model, each.params) for each in loaded), strict=True)
        texts = list(zip(prompts, answers, strict=True))
        ours = trace_texts(models_of, params, texts, limit=24, warp=warp, max_draft_length=6)
        name = "recorder, " + ", ".join(f"{key} {value:g}" for key, value in warp.items())
        rows.append({"model": name} | apart(trace, ours))
    return rows


def apart(first: Trace, other: Trace) -> dict[str, float]:
    """Largest differences of two traces along the same texts, of what does not depend on random numbers. Of sampled
    ones "bits" is the distance of the number accepted from its mean, the sum of overlaps, in standard deviations."""
    worst = {name: _largest(getattr(first, name), getattr(other, name)) for name in SHARED}
    here = np.nonzero(~first.accepted & (np.arange(first.accepted.shape[1]) <= first.length[:, None]))
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


def _largest(first: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; infinite where only one is finite."""
    same = (first == other) | (np.isnan(first) & np.isnan(other))
    gap = np.where(same, 0.0, np.abs(np.where(same, 0.0, first) - np.where(same, 0.0, other)))
    return float(np.nan_to_num(gap, nan=np.inf).max())


main = command(Parity, parity, __doc__)

if __name__ == "__main__":
    sys.exit(main())
