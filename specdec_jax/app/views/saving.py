"""What `generate --page FILE` writes."""

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


def save_drawing(command: Any, prompt: str, policy: StoppingPolicy, chunks: Stream) -> None:
    """The page that the `generate` command asks for, with all that was decoded."""
    from specdec_jax.app.views.page import save_page

    output, models, rules, decoding = command.output, command.models, command.rules, command.decoding
    if output.page is None:
        return
    line = " ".join(prompt.split())
    title = line if len(line) <= 80 else line[:79] + "…"
    details = {
        "prompt": prompt,
        "target": models.target,
        "drafter": models.drafter,
        "policy": rules.policy,
        "verifier": rules.verifier,
        "temperature": f"{decoding.temperature:g}",
        "seed": str(decoding.seed),
    }
    drawn: dict[str, Any] = {"title": title, "details": details, "entropy_factor": entropy_factor(policy)}
    print("page:", save_page(output.page, chunks.result(), chunks.tokenizer, **drawn), file=sys.stderr)


def entropy_factor(policy: StoppingPolicy) -> float | None:
    """AdaEDL's factor, given or its default; None for rules without one: their threshold is of another kind."""
    if policy.name != "adaedl":
        return None
    return float(policy.hyperparameters["entropy_factor"])
