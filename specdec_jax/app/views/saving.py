"""Files and folders that commands write: checked before any work is done; and the page of `generate --page FILE`."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from specdec_jax.app.views.printing import one_line
from specdec_jax.loading.new_folder import writable_folder
from specdec_jax.text.streaming import Stream
from specdec_jax.types import StoppingPolicy

PAGES = (".html", ".htm")


def check_output(output: Any) -> None:
    """Refuses what the `generate` command could not write, before the models are read.

    Raises:
        ValueError: a record without JSON, or as `writable_folder` and `check_file` say.
    """
    if output.record and not output.json:
        raise ValueError("--record needs --json: there is no other place for it")
    if output.profile is not None:
        writable_folder(output.profile, "profile folder")
    if output.page is not None:
        check_file(output.page, PAGES)


def check_file(path: str | Path, suffixes: tuple[str, ...] = ()) -> None:
    """Refuses a file that could not be written.

    Raises:
        ValueError: a folder of that name, no folder to hold it, no right to write there, or another suffix.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def save_drawing(command: Any, prompt: str, policy: StoppingPolicy, chunks: Stream) -> None:
    """The page that the `generate` command asks for, with all that was decoded."""
    from specdec_jax.app.views.page import save_page

    output, models, rules, decoding = command.output, command.models, command.rules, command.decoding
    if output.page is None:
        return
    details = {
        "prompt": prompt,
        "target": models.target,
        "drafter": models.drafter,
        "policy": rules.policy,
        "verifier": rules.verifier,
        "temperature": f"{decoding.temperature:g}",
        "seed": str(decoding.seed),
    }
    drawn: dict[str, Any] = {"title": one_line(prompt), "details": details, "entropy_factor": entropy_factor(policy)}
    print("page:", save_page(output.page, chunks.result(), chunks.tokenizer, **drawn), file=sys.stderr)


def entropy_factor(policy: StoppingPolicy) -> float | None:
    """AdaEDL's factor, given or its default; None for rules without one: their threshold is of another kind."""
    if policy.name != "adaedl":
        return None
    return float(policy.hyperparameters["entropy_factor"])
