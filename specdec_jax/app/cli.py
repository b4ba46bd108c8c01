"""`python -m specdec_jax ...`: what a person types. Options are fields of dataclasses, here and in options.py."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from specdec_jax.app.options import Decoding, Drafting, Maybe, Models, Rules, Switch
from specdec_jax.app.views.warned import warned_in_a_line

FAILED, BAD_INPUT, NOT_SHOWN, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141


@dataclass(frozen=True)
class Beams:
    beams: Annotated[int | None, tyro.conf.arg(aliases=["--num-beams"], metavar="INT", help_behavior_hint="")] = None
    """Beam search with this many beams instead of drafting; a table of all beams follows the text."""
    length_penalty: float = 1.0
    """With --beams: the score is the log-probability over length to this power; above 0 favours long texts."""
    min_new_tokens: int = 0
    """With --beams: no end of sequence before this many tokens."""


@dataclass(frozen=True)
class Output:
    json: Switch = False
    """Print text, tokens, statistics and times as one line of JSON instead of streaming."""
    compare: Switch = False
    """Also decode the prompt plainly, alternating with speculative decoding, and print the measured speed-up."""
    record: Switch = False
    """Add every round to the JSON: drafted, accepted, lambda, entropies."""
    rejected: Switch = True
    """Hide rejected drafts on a terminal."""
    phases: Switch = False
    """Run the phase monitor even if no rule reads it; page and picture shade reasoning phases."""
    statistics: Switch = True
    """Print no statistics to standard error at the end."""
    profile: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Write a JAX profile of the decoding (scopes draft, verify, commit) to this folder."""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write one HTML file: the text by kind of token, rejected drafts, entropies and thresholds, statistics."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the entropies and thresholds as a picture: .png, .svg or .pdf."""


@dataclass(frozen=True, kw_only=True)
class Generate(Drafting):
    """Decode a prompt with adaptive speculative decoding and stream the text.

    A small drafter proposes tokens and the target verifies them in one pass; the output distribution is the target's.
    On a terminal accepted drafts are green, rejected ones struck out in red with the target's token in yellow after
    them; bonus tokens, after drafts that were all accepted, are cyan. Piped, the text is plain.

      python -m specdec_jax generate "Why is the sky blue?"
      python -m specdec_jax generate "Why is the sky blue?" --policy "adaedl(threshold=0.3)" --compare
      python -m specdec_jax generate "Name three rivers." --temperature 0.8 --seed 7 --stop "2." --json
      python -m specdec_jax generate "Name three rivers." --beams 4 --length-penalty 1.0
      echo "Once upon a time" | python -m specdec_jax generate - --no-chat --drafter none
    """

    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """- reads standard input."""
    models: Models = field(default_factory=Models)
    rules: Rules = field(default_factory=Rules)
    decoding: Decoding = field(default_factory=Decoding)
    beams: Beams = field(default_factory=Beams)
    output: Output = field(default_factory=Output)


@dataclass(frozen=True)
class Chat(Drafting):
    """Chat with a model under speculative decoding; slash commands change every setting.

    Alt-Enter is a new line, Tab completes, Ctrl-C stops an answer and keeps the session; /help lists the commands.
    If standard input is not a terminal, each of its lines is a message or a command.

      python -m specdec_jax chat
      python -m specdec_jax chat --policy "static(draft_length=3)" --temperature 0.8
      printf 'Name three rivers.\\n/stats\\n' | python -m specdec_jax chat
    """

    models: Models = field(default_factory=Models)
    rules: Rules = field(default_factory=Rules)
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class VerifyLossless:
    """Prove that a policy and a verifier leave the target's distribution unchanged.

    Exact enumeration on toy models, all rounds of short drafts and every round of long ones, then chi-square tests of
    samples from the whole decoder, on a toy and, with a target and a drafter, on that pair. Exit code 1: not lossless;
    3: not shown, because the rule was never seen to stop at some draft, or some draft never occurred.

      python -m specdec_jax verify-lossless --policy "adaedl(keep_checked_token=True)" --verifier block
      python -m specdec_jax verify-lossless --policy my_rule.py --target smollm2 --drafter smollm2-drafter
    """

    rules: Rules = field(default_factory=Rules)
    max_draft_length: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """The longest draft tested, at most 10; by default 5 on toys and 7 on a pair."""
    sequences: int = 40960
    """Sequences of the sampled test on a toy."""
    target: Annotated[str | None, Maybe] = None
    """A real target for the sampled test."""
    drafter: Annotated[str | None, Maybe] = None
    """A real drafter for the sampled test."""
    prompt: str = "Once upon a time"
    """The prompt of the sampled test on a real pair."""
    temperature: float = 1.0
    """The temperature of the sampled test on a real pair."""
    pair_sequences: int = 512
    """Sequences of the sampled test on a real pair; 512 take some minutes on two CPU cores; Ctrl-C stops with the
    results so far."""
    json: Switch = False
    """Print the report as one line of JSON."""


COMMANDS: dict[str, Any] = {"generate": Generate, "chat": Chat, "verify-lossless": VerifyLossless}
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (not lossless), 2 (bad input), 3 (not shown), 130 (Ctrl-C), 141.

    What cannot be parsed, and --help, end the program as argparse does it (2 and 0).
    """
    try:
        command = _parsed(sys.argv[1:] if arguments is None else list(arguments))
        runs = {Generate: run_generate, Chat: run_chat, VerifyLossless: run_verify}
        with warned_in_a_line():
            return runs[type(command)](command)
    except BrokenPipeError:  # whoever read our output has enough; nothing more can be written, at exit neither
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parsed(arguments: list[str]) -> Any:
    """The command's dataclass. Without a command's name the program ends with the list of them, a line each."""
    program = "specdec-jax" if Path(sys.argv[0]).name == "specdec-jax" else "python -m specdec_jax"
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        command = tyro.cli(COMMANDS[name], args=arguments[1:], prog=f"{program} {name}", config=STYLE)
        if isinstance(command, Generate):
            from specdec_jax.app.views.searching import check_beams

            check_beams(command, arguments[1:])
        return command
    listed = [
        Annotated[kind, tyro.conf.subcommand(name, description=str(kind.__doc__).split("\n")[0])]
        for name, kind in COMMANDS.items()
    ]
    about = "Adaptive speculative decoding in JAX. A command's own --help lists its options."
    return tyro.cli(Union[*listed], args=arguments, prog=program, description=about)  # type: ignore[arg-type]


def run_generate(command: Generate) -> int:
    """The `generate` command."""
    prompt = _prompt(command.prompt)
    output = command.output
    settings, policy, verifier = _checked(command)
    if command.beams.beams is not None:
        return _run_search(command, prompt)
    from specdec_jax.app.views.interrupts import interrupts_end_here
    from specdec_jax.app.views.printing import print_json, print_stream, profiled
    from specdec_jax.app.views.saving import check_output, save_drawings

    check_output(output)
    with interrupts_end_here():
        chunks = _begin(command, prompt, settings, policy, verifier)
    with profiled(output.profile):
        if output.json:
            finished = print_json(chunks, output.record)
        else:
            finished = print_stream(chunks, rejected=output.rejected, statistics=output.statistics)
    save_drawings(command, prompt, policy, chunks)
    if output.compare and finished:
        _compare(chunks)
    return 0 if finished else INTERRUPTED


def _compare(chunks: Any) -> None:
    from specdec_jax.app.chat.comparing import against_plain
    from specdec_jax.app.views.interrupts import interrupts_end_here
    from specdec_jax.app.views.printing import status

    with interrupts_end_here(), status("Decoding in turns, plainly and with drafts"):
        sentence = against_plain(chunks.pair, chunks.request)
    print(sentence, file=sys.stderr)


def _run_search(command: Generate, prompt: str) -> int:
    from specdec_jax.app.views.interrupts import interrupts_end_here
    from specdec_jax.app.views.searching import print_beams, search

    with interrupts_end_here():
        found = search(command, prompt)
    print_beams(found, command.output.json, command.output.statistics)
    return 0


def run_chat(command: Chat) -> int:
    """The `chat` command."""
    settings, *_ = _checked(command)
    from specdec_jax.app.chat.terminal import talk

    return talk(settings)


def run_verify(command: VerifyLossless) -> int:
    """The `verify-lossless` command."""
    from specdec_jax.app.views.proof import verify
    from specdec_jax.lossless.conclusion import LOSSLESS, NOT_LOSSLESS

    options = {name: value for name, value in vars(command).items() if name != "rules"}
    conclusion = verify(**asdict(command.rules), **options)
    return {LOSSLESS: 0, NOT_LOSSLESS: FAILED}.get(conclusion, NOT_SHOWN)


def _begin(command: Generate, prompt: str, settings: Any, policy: Any, verifier: Any) -> Any:
    """The Stream of the command's models and options, compiled and prefilled."""
    from specdec_jax.app.chat.settings import build
    from specdec_jax.app.views.printing import status
    from specdec_jax.compilation_cache import enable, kept
    from specdec_jax.text.streaming import stream

    folder = enable()
    with status(f"Loading {settings.target}" + (f" and {settings.drafter}" if settings.drafter != "none" else "")):
        pair = build(settings, policy, verifier)
    with status(f"Compiling once; {kept(folder)}"):
        rounds = 8 if command.output.json and not command.decoding.stop else 1
        said = {"chat": settings.chat, "system": settings.system, "calibration": settings.calibration}
        return stream(prompt, settings, pair=pair, rounds=rounds, **said)


def _prompt(given: str) -> str:
    if given != "-":
        text = given
    elif sys.stdin is None:
        raise ValueError("standard input is closed, and the prompt - reads it")
    else:
        try:
            text = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8: {error}") from None
    if not text.strip():
        raise ValueError("the prompt is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python keeps bytes it cannot decode
        raise ValueError(f"the prompt is not valid UTF-8: {text!r}")
    return text


def _checked(command: Generate | Chat) -> tuple[Any, Any, Any]:
    """Settings, the policy and the verifier; refuses what needs no weights to be refused."""
    from specdec_jax.app.chat.settings import Settings, check

    if command.models.drafter == "none" and command.rules.policy.endswith(")"):
        raise ValueError(f"--drafter none drafts nothing: the options of --policy {command.rules.policy} have no use")
    given = vars(command.models) | vars(command.rules) | vars(command.decoding)
    phases = isinstance(command, Generate) and command.output.phases
    settings = Settings(**given, max_draft_length=command.max_draft_length, phases=phases)
    return settings, *check(settings)
