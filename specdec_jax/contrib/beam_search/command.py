"""`generate --beams N`: option checks, the search, and printing of hypotheses."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.contrib.beam_search.search import Hypothesis, beam_search
from specdec_jax.loading import download
from specdec_jax.ranges import check_fields
from specdec_jax.text.escapes import printed, shown
from specdec_jax.text.json_lines import json_text

# What a search neither drafts with nor writes. Looked for by name, since a default given by hand is as mistaken.
NO_USE = ("--calibration", "--costs", "--policy", "--verifier", "--max-draft-length", "--stop", "--record", "--cite")
NO_USE = (*NO_USE, "--log-probs", "--phases", "--page", "--compare")
DRAWING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # only these values are allowed


def check_beams(command: Any, words: Sequence[str]) -> None:
    """Checks the options that conflict with `--beams` or require it, before weights are read.

    Args:
        words: the command line, as typed.

    Raises:
        ValueError: a conflicting option.
    """
    used = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    beams = command.beams.beams
    if beams is None:
        for option in ("--length-penalty", "--min-new-tokens"):
            if option in used:
                raise ValueError(f"{option} needs --beams: only a search has a use for it")
        return
    check_fields(command.beams)
    useless = [option for option in NO_USE if option in used]
    if "--drafter" in used and command.models.drafter != "none":
        useless.append(f"--drafter {command.models.drafter}")
    for name, off in DRAWING.items():
        value = getattr(command.decoding, name)
        if value != off:
            useless.append(f"--{name.replace('_', '-')} {value:g}")
    if useless:
        raise ValueError(f"--beams looks for the most probable text, without drafts or draws: {useless[0]} has no use")


def search(command: Any, prompt: str, status: Callable[[str], AbstractContextManager[Any]]) -> list[Hypothesis]:
    """The hypotheses of the command's target, best first; `status` shows a message while the block runs."""
    from specdec_jax.compilation_cache import enable

    enable()
    models, beams, decoding = command.models, command.beams, command.decoding
    options = {name: getattr(decoding, name) for name in ("max_new_tokens", "chat", "system", "parse_special")}
    options |= {"width": beams.beams, "length_penalty": beams.length_penalty, "min_new_tokens": beams.min_new_tokens}
    download(models.target)
    with status(f"Searching with {beams.beams} beams of {models.target}"):
        return beam_search(prompt, target=models.target, dtype=models.dtype, **options)


def print_beams(beams: Sequence[Hypothesis], as_json: bool = False, statistics: bool = True) -> None:
    """Prints the best text to standard output and a table of all to standard error; or all as one line of JSON."""
    if as_json:
        fields = {**beams[0]._asdict(), "beams": [beam._asdict() for beam in beams]}
        print(printed(json_text(fields)), flush=True)
        return
    print(printed(beams[0].text), flush=True)
    if statistics:
        Console(stderr=True, highlight=False).print(table(beams))


def table(beams: Sequence[Hypothesis]) -> Table:
    """A row per hypothesis: score, log-probability in nats, tokens, finish reason, and text after the common prefix."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("beam", "score", "log p", "tokens"):
        grid.add_column(column, justify="right", no_wrap=True)
    grid.add_column("end", no_wrap=True)
    grid.add_column("text")  # the column that shrinks in narrow terminals
    texts = [" ".join(shown(beam.text).split()) for beam in beams]
    same = os.path.commonprefix(texts).rpartition(" ")[0] if len(beams) > 1 else ""
    for number, (beam, text) in enumerate(zip(beams, texts, strict=True), start=1):
        cells = [str(number), f"{beam.score:.4f}", f"{beam.log_prob:.3f}", str(len(beam.tokens)), beam.finish_reason]
        grid.add_row(*cells, Text("…" * bool(same) + text[len(same) :], no_wrap=True, overflow="ellipsis"))
    return grid
