"""The command line `python -m specdec_jax ...`; its commands and options are in commands.py and options.py."""

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from specdec_jax.app.commands import (
    BEAM_SEARCH,
    ENGINE_LOGS,
    Advise,
    Chat,
    Doctor,
    Generate,
    GenerateFile,
    VerifyLossless,
)
from specdec_jax.ranges import check_fields
from specdec_jax.strategy import nearest
from specdec_jax.text.escapes import CONTROL, ERROR_WIDTH, error_line, one_line
from specdec_jax.text.options import Rules

FAILED, BAD_INPUT, NOT_SHOWN, DEFECT, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 70, 130, 141
COMMANDS: dict[str, Any] = {
    "generate": Generate,
    "generate-file": GenerateFile,
    "chat": Chat,
    "doctor": Doctor,
    "advise": Advise,
    "verify-lossless": VerifyLossless,
}
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (the answer is no), 2 (invalid input), 3 (not shown), 70 (a bug of
    this program), 130 (Ctrl-C), 141 (the reader of the output is gone). Raises SystemExit for --help (0) and for what
    cannot be parsed (2).
    """
    try:
        command = _parsed(sys.argv[1:] if arguments is None else list(arguments))
        processes = os.environ.get("JAX_NUM_PROCESSES", "1")
        if isinstance(command, (Generate, GenerateFile)) and processes != "1":
            hint = "split the input, or set a mesh in Python (docs/scaling.md)"
            raise ValueError(f"this command decodes in one process, but JAX_NUM_PROCESSES is {processes}: {hint}")
        mesh = getattr(getattr(command, "models", command), "mesh", None)
        if mesh is not None:
            from specdec_jax.meshes import use_mesh

            use_mesh(mesh)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return run_generate(command) if isinstance(command, Generate) else run_other(command)
    except BrokenPipeError:  # the reader of the output is gone: nothing more can be written, not even at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(error_line(reason), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        from specdec_jax.decoding.user_code import describe_error, location

        # A bug is not 1, which means that something is not lossless.
        if not isinstance(error, ValueError) and not location(error):
            traceback.print_exc()
            return DEFECT
        print(error_line(describe_error(error)), file=sys.stderr)
        return BAD_INPUT


def _show_warning(message: Warning | str, *place: Any) -> None:
    """Prints a warning as one line on standard error, without its source."""
    del place
    print("warning:", one_line(str(message), ERROR_WIDTH), file=sys.stderr, flush=True)


def _parsed(arguments: list[str]) -> Any:
    """The command's dataclass."""
    program = "specdec-jax" if Path(sys.argv[0]).name == "specdec-jax" else "python -m specdec_jax"
    name = arguments[0] if arguments else ""
    if strange := [word for word in arguments if word.startswith("-") and CONTROL.search(word)]:
        raise ValueError(f"no option has control characters: {strange[0]}")  # tyro's box would print them
    if name in COMMANDS:
        command = tyro.cli(COMMANDS[name], args=arguments[1:], prog=f"{program} {name}", config=STYLE)
        check_fields(command)
        if isinstance(command, Generate):
            import_module(f"{BEAM_SEARCH}.command").check_beams(command, arguments[1:])
        by_hand = any(word.partition("=")[0] == "--policy" for word in arguments)  # even the default one
        if by_hand and isinstance(command, (Generate, GenerateFile, Chat)) and command.models.drafter == "none":
            raise ValueError(f"--drafter none drafts nothing: --policy {command.rules.policy} has no use")
        return command
    if not name.startswith("-"):
        raise ValueError((f"no command {name!r}" if name else "a command is missing") + nearest(name, COMMANDS))
    listed = (
        Annotated[kind, tyro.conf.subcommand(name, description=str(kind.__doc__).split("\n")[0])]
        for name, kind in COMMANDS.items()
    )
    either: Any = Union[*listed]
    about = "Adaptive speculative decoding in JAX. A command's own --help lists its options."
    return tyro.cli(either, args=arguments, prog=program, description=about)


def run_generate(command: Generate) -> int:
    """The `generate` command."""
    prompt, output, settings = _prompt(command.prompt), command.output, _checked(command)
    from specdec_jax.app.views.printing import interrupts_end_here, print_json, print_stream, status

    if command.beams.beams is not None:
        searching = import_module(f"{BEAM_SEARCH}.command")
        with interrupts_end_here():
            beams = searching.search(command, prompt, status)
        searching.print_beams(beams, output.json, output.statistics)
        return 0
    from specdec_jax.app.settings import build, download_models
    from specdec_jax.compilation_cache import describe_cache, enable
    from specdec_jax.loading.new_folder import check_file
    from specdec_jax.text.streaming import stream

    if (output.record or output.log_probs) and not output.json:
        option = "--record" if output.record else "--log-probs"
        raise ValueError(f"{option} needs --json: there is no other place for it")
    if output.page is not None:
        check_file(output.page, (".html", ".htm"))
    with interrupts_end_here():
        cache = describe_cache(enable())
        download_models(settings)
        with status(f"Loading {settings.target}" + (f" and {settings.drafter}" if settings.drafter != "none" else "")):
            pair = build(settings)
        with status(f"Compiling once; {cache}"):
            options = {name: getattr(settings, name) for name in ("chat", "system", "parse_special", "calibration")}
            rounds = 8 if output.json and not settings.stop else 1
            chunks = stream(prompt, settings, pair=pair, rounds=rounds, **options)
    finished = print_json(chunks, output.record) if output.json else print_stream(chunks, statistics=output.statistics)
    if output.page is not None:
        from specdec_jax.app.views.page import save_drawing

        save_drawing(output.page, chunks.result(), pair.target.tokenizer, prompt, settings)
        print("page:", output.page, file=sys.stderr)
    if command.cite:
        from specdec_jax.text.citations import citations

        print(citations(pair), file=sys.stderr)
    if output.compare and finished:
        from specdec_jax.app.comparing import against_plain

        with interrupts_end_here(), status("Decoding in turns, plainly and with drafts"):
            sentence = against_plain(pair, chunks.request)
        print(sentence, file=sys.stderr)
    return 0 if finished else INTERRUPTED


def run_other(command: GenerateFile | Chat | Doctor | Advise | VerifyLossless) -> int:
    """The other commands; 1 if lines of a file were refused, a pair does not pay or a rule is not lossless."""
    if isinstance(command, VerifyLossless):
        from specdec_jax.app.views.proof import verify
        from specdec_jax.lossless import LOSSLESS, NOT_LOSSLESS

        return {LOSSLESS: 0, NOT_LOSSLESS: FAILED}.get(verify(command), NOT_SHOWN)
    if isinstance(command, Advise):
        from specdec_jax.app.views.printing import status

        return 0 if import_module(f"{ENGINE_LOGS}.command").advise_on(command, status) else FAILED
    settings = _checked(command)
    if isinstance(command, Chat):
        from specdec_jax.app.chat.terminal import talk

        return talk(settings, command.cite)
    if isinstance(command, GenerateFile):
        from specdec_jax.app.file_command import generate_file

        return FAILED if generate_file(command, settings) else 0
    from specdec_jax.app.doctor import examine

    return 0 if examine(command, settings).pays else FAILED


def _prompt(prompt: str) -> str:
    if prompt != "-":
        text = prompt
    elif sys.stdin is None:
        raise ValueError("standard input is closed, and the prompt - reads it")
    else:
        try:
            text = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8: {error}") from None
    if not text.strip():
        raise ValueError("the prompt is empty")
    if (wrong := re.search("[\ud800-\udfff]", text)) is not None:  # Python's representation of undecodable bytes
        byte = ord(wrong[0]) & 0xFF
        raise ValueError(f"the prompt is not valid UTF-8: byte 0x{byte:02x} after {wrong.start()} characters")
    return text


def _checked(command: Generate | GenerateFile | Chat | Doctor) -> Any:
    """The settings, after the checks that need no weights."""
    from specdec_jax.app.settings import Settings, check

    rules = Rules() if isinstance(command, Doctor) else command.rules
    options = vars(command.models) | vars(rules) | vars(command.decoding)
    output = command.output if isinstance(command, Generate) else command
    options |= {name: getattr(output, name, False) for name in ("phases", "log_probs")}
    settings = Settings(**options, max_draft_length=command.max_draft_length)
    check(settings)
    return settings
