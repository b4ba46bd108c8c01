"""What `generate --page FILE --picture FILE` writes."""

import sys
from typing import Any

from specdec_jax.app.views.printing import check_writable
from specdec_jax.app.views.writable import check_file
from specdec_jax.text.streaming import Stream
from specdec_jax.types import StoppingPolicy

PAGES = (".html", ".htm")


def check_output(output: Any) -> None:
    """Refuses what the `generate` command could not write, before the models are read.

    Raises:
        ValueError: a record without JSON, or as `check_writable` and `check_file` say.
    """
    if output.record and not output.json:
        raise ValueError("--record needs --json: there is no other place for it")
    check_writable(output.profile)
    if output.page is not None:
        check_file(output.page, PAGES)
    if output.picture is not None:
        from specdec_jax.app.views.picture import SUFFIXES

        check_file(output.picture, SUFFIXES)


def save_drawings(command: Any, prompt: str, policy: StoppingPolicy, chunks: Stream) -> None:
    """The page and the picture that the `generate` command asks for, of all that was decoded."""
    from specdec_jax.app.views.page import save_page
    from specdec_jax.app.views.picture import save_picture

    output, models, rules, decoding = command.output, command.models, command.rules, command.decoding
    if output.page is None and output.picture is None:
        return
    line = " ".join(prompt.split())
    drawn = {
        "title": line if len(line) <= 80 else line[:79] + "…",
        "entropy_factor": entropy_factor(policy),
    }
    details = {
        "prompt": prompt,
        "target": models.target,
        "drafter": models.drafter,
        "policy": rules.policy,
        "verifier": rules.verifier,
        "temperature": f"{decoding.temperature:g}",
        "seed": str(decoding.seed),
    }
    result = chunks.result()
    if output.page is not None:
        print("page:", save_page(output.page, result, chunks.tokenizer, details=details, **drawn), file=sys.stderr)
    if output.picture is not None:
        print("picture:", save_picture(output.picture, result, chunks.tokenizer, **drawn), file=sys.stderr)


def entropy_factor(policy: StoppingPolicy) -> float | None:
    """AdaEDL's factor, given or its default; None for rules without one: their threshold is of another kind."""
    if policy.name != "adaedl":
        return None
    return float(policy.hyperparameters["entropy_factor"])
