"""Do the families give the logits that transformers gives on torch?

Question:  Of small random models of every family, written as the hub has them, and of any model by --models: how far
           are the logits from those of transformers on torch, both in float32?
Command:   python -m experiments.parity [--models HuggingFaceTB/SmolLM2-135M ./folder]    (make parity)
Time:      six minutes on 2 cores, and some more to make the environment with torch, once
Expected:  every row under 1e-4 of the largest logit; exit code 1 where one is not
Output:    runs/parity-<time>/, with the models themselves; results.jsonl has a line a model

The random models are written twice: in float32 as one file, in bfloat16 as several (the index names them). One pass of
20 tokens, and the last position by itself behind a cache. --reference writes the file that tests/models/test_models.py
compares with where there is no torch.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.lib.commands import Output, command
from experiments.lib.engines import Failed, python_of, run
from experiments.lib.parity_side.cases import CASES, POSITIONS, TOKENS, slug
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import markdown, publish
from specdec_jax.loading import load_model
from specdec_jax.loading.new_folder import write_text

SIDE = Path(__file__).parent / "lib" / "parity_side" / "logits.py"
NEAR = 1e-4  # tolerance relative to the largest logit
MOST_SECONDS = 3600  # for a script in the environment with torch


@dataclass(frozen=True)
class Parity(Output):
    """Compare logits with those of transformers."""

    models: tuple[str, ...] = ()  # Hub ids or folders; none: small random models of every family.
    reference: str | None = None
    """Also write the logits of the small models to this file, as tests/data/family_logits.json has them."""
    environments: str = "runs/environments"  # Folder of the environment with torch.
    install_seconds: float = 3600.0  # Most time for making it.

    def __post_init__(self) -> None:
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
    return 1 if far else 0


def _compared(source: str, theirs: Any) -> dict[str, Any]:
    """Largest differences of the logits, over the largest logit: of one pass, and of the last token behind a cache."""
    loaded = load_model(source, dtype="float32")
    tokens, logits = jnp.asarray(theirs["tokens"], jnp.int32), theirs["logits"]
    apply, size = jax.jit(loaded.model.apply), float(np.abs(logits).max())
    with jax.default_matmul_precision("highest"):
        source = tuple(jnp.asarray(theirs[name], jnp.int32) for name in ("source", "source_length") if name in theirs)
        cache = loaded.model.init_cache(loaded.params, len(tokens), 32, source or None)
        ours, cache = apply(loaded.params, tokens, cache)
        cache = loaded.model.with_length(cache, cache.length - 1)
        last, _ = apply(loaded.params, tokens[:, -1:], cache)
    vocab = logits.shape[-1]
    return {
        "model_type": loaded.config.model_type,
        "pass": float(np.abs(ours[..., :vocab] - logits).max()) / size,
        "cached": float(np.abs(last[:, 0, :vocab] - logits[:, -1]).max()) / size,
    }


main = command(Parity, parity, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
