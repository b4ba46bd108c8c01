"""The output of /stats, /phases and /save for the last answer."""

from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specdec_jax.app.chat.session import Session, Turn
from specdec_jax.app.settings import Settings
from specdec_jax.app.views.page import PHASES, save_drawing
from specdec_jax.text.escapes import shown


def describe(settings: Settings) -> str:
    """The settings on one line: models, rules, and other settings that differ from the defaults."""
    parts = [f"{settings.target} + {settings.drafter}", settings.policy, settings.verifier]
    parts.append(f"temperature {settings.temperature:g}" if settings.temperature else "greedy")
    plain = Settings()
    for name in ("top_k", "top_p", "min_p", "seed", "max_new_tokens", "max_draft_length"):
        value = getattr(settings, name)
        if value != getattr(plain, name):
            parts.append(f"{name.replace('_', '-')} {value}")
    return shown(" | ".join(parts))


def stats(session: Session) -> RenderableType:
    """The settings, and for the last answer its speed, its drafts and the prefilled part of the prompt."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("settings", Text(describe(session.settings)))
    if session.settings.system is not None:
        grid.add_row("system", Text(shown(session.settings.system)))
    if session.last is None:
        grid.add_row("answers", "none yet")
        return grid
    turn, context = session.last, session.pair.target.model.spec.context
    result, figures = turn.result, turn.result.statistics
    read = f"{turn.prefilled} ({turn.why})" if turn.prefilled > 1 else str(turn.prefilled)
    used = len(result.prompt_tokens) + len(result.tokens)
    rows = [
        ("answered by", describe(turn.settings)),
        ("answer", f"{len(result.tokens)} tokens in {result.seconds:.2f} s, {result.finish_reason}"),
        ("prompt tokens re-used", str(turn.reused)),
        ("prompt tokens read", read + (f" in {result.prefill_seconds:.2f} s" if result.prefill_seconds else "")),
        ("context", f"{used} of {context} tokens, {turn.slots} cache slots"),
        ("target passes", f"{figures['num_rounds']}, {_number(figures['tokens_per_round'])} tokens each"),
        ("drafter passes", f"{figures['drafter_passes']}, of which discarded {figures['discarded_passes']}"),
    ]
    if figures["num_draft_tokens"]:
        rate, positions = figures["draft_acceptance_rate"], figures["acceptance_per_position"]
        accepted = f"{figures['num_accepted_tokens']} of {figures['num_draft_tokens']} ({rate:.0%})"
        rows += [
            ("drafts accepted", accepted),
            ("mean draft length", _number(figures["mean_draft_length"])),
            ("accepted by position", " ".join("-" if share is None else f"{share:.0%}" for share in positions)),
        ]
    if result.compile_seconds:
        rows.append(("compiled in", f"{result.compile_seconds:.1f} s"))
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def phases(session: Session) -> RenderableType:
    """The lengths of the phases of the last answer."""
    rounds = _last(session).result.rounds or []
    watched = session.pair.decoder.parts.monitor.init(1) != ()
    if not watched and not any(int(round_["phase"]) for round_ in rounds):
        return Text("No phases are being watched: /phases on, then ask.")
    runs = groupby(rounds, key=lambda round_: int(round_["phase"]))
    lengths = ((phase, sum(int(round_["emitted"]) for round_ in part)) for phase, part in runs)
    named = dict(enumerate(PHASES))
    return Text(", ".join(f"{named.get(phase, phase)} {tokens}" for phase, tokens in lengths) + " (tokens, in order)")


def save(session: Session, name: str) -> RenderableType:
    """Writes the last answer as one HTML file.

    Raises ValueError: no name, no answer yet, or a folder that does not exist.
    """
    if not name:
        raise ValueError("/save needs a file name: /save run.html")
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to save in")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    turn = _last(session)
    question = next((m["content"] for m in reversed(session.messages) if m["role"] == "user"), "")
    save_drawing(path, turn.result, turn.tokenizer, question, turn.settings)
    return Text(f"saved {path}")


def _last(session: Session) -> Turn:
    if session.last is None:
        raise ValueError("there is no answer yet: ask something first")
    return session.last
