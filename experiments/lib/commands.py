"""An experiment's command line: its help, the options that several experiments take, and how it ends: one line on
invalid input, and an exit code.

Options are dataclasses to inherit from: each is called and explained alike everywhere. What an experiment inherits
stands before its own options in its help; one of another default is set again there.
"""

import functools
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tyro
from rich.console import Console

from configs.base import load_config
from experiments.lib.run_folder import opened
from experiments.lib.smoke import tiny_pair
from specdec_jax.app.views.printing import progress
from specdec_jax.compilation_cache import enable
from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.kernels.compiled import say
from specdec_jax.loading import LoadedModel, download, for_target, load_drafter, load_model, refuse_encoders
from specdec_jax.meshes import use_mesh
from specdec_jax.ranges import check_fields
from specdec_jax.text.escapes import error_line
from specdec_jax.text.options import ModelNames

Main = Callable[..., int]  # takes the words of a command line, those of the process unless given


def exit_codes(*also: type[Exception], interrupted: str | None = None) -> Callable[[Main], Main]:
    """A `main` that ends with one line on standard error and 2 on ValueError, OSError and `also`. `interrupted`: what
    Ctrl-C says before it ends with 130; none: how to go on in the run folder."""

    def wrapped(main: Main) -> Main:
        @functools.wraps(main)
        def run(*words: Any, **named: Any) -> int:
            before = len(opened)
            try:
                return main(*words, **named)
            except (ValueError, OSError, *also) as error:
                print(error_line(error), file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                go_on = f"; to go on: the same command with --out {opened[before]}" if opened[before:] else ""
                print(interrupted or f"interrupted{go_on}", file=sys.stderr)
                return 130

        return run

    return wrapped


def parsed(kind: Any, doc: str | None, arguments: Sequence[str] | None, program: str | None = None) -> Any:
    """The command line as a `kind`. `doc`: what the help begins with; `program`: as the usage line has it, else the
    module of `kind`. What cannot be parsed ends the program with 2, --help with 0."""
    spec = getattr(sys.modules[kind.__module__], "__spec__", None)  # where it is the program that runs
    program = program or f"python -m {kind.__module__ if spec is None else spec.name}"
    description = textwrap.indent((doc or "").strip(), " ")  # tyro keeps the lines of indented text
    return tyro.cli(kind, args=arguments, prog=program, description=description)


def command(kind: Any, run: Callable[[Any, Console], Any], doc: str | None, program: str | None = None) -> Main:
    """An experiment's `main`: hands the command line as a `kind`, and a console, to `run`. Its exit code is the number
    that `run` returns, 0 where that is something else, and 2 on invalid input."""

    @exit_codes()
    def main(arguments: Sequence[str] | None = None) -> int:
        config = parsed(kind, doc, arguments, program)
        use_mesh(getattr(config, "mesh", None))
        ended = run(config, terminal())
        return ended if isinstance(ended, int) else 0

    return main


def with_studies(main: Main, **studies: Main) -> Main:
    """`main`, and further mains that the first word of the command line names: `python -m experiments.NAME STUDY`."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        words = sys.argv[1:] if arguments is None else list(arguments)
        return studies[words[0]](words[1:]) if words and words[0] in studies else main(words)

    return run


def terminal() -> Console:
    """Where experiments print: words as they are given, neither coloured nor read as markup."""
    return Console(highlight=False, markup=False)


def config_command(experiment: str, run: Callable[[Any, Console], Any], doc: str | None) -> Main:
    """The `main` of an experiment that takes a config file: hands the config, and a console, to `run`; as `command`."""

    @exit_codes()
    def main(arguments: Sequence[str] | None = None) -> int:
        words = config_words(experiment, doc, arguments)
        if words:
            config = load_config(words[0], words[1:], experiment)
            use_mesh(getattr(config, "mesh", None))
            run(config, terminal())
        return 0

    return main


def config_words(experiment: str, doc: str | None, arguments: Sequence[str] | None) -> list[str]:
    """The words of `python -m experiments.EXPERIMENT CONFIG.py [OPTIONS]`; none after --help, which is answered here.
    Raises ValueError where the first word is no config."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    usage = f"python -m experiments.{experiment} CONFIG.py [OPTIONS]"
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {usage}; CONFIG.py --help lists them\n\n{doc}")
        return []
    if not words or words[0].startswith("-"):
        raise ValueError(f"name a config first: {usage}")
    return words


@contextmanager
def bar(console: Console, title: str, total: int, done: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """A progress bar with its rate; gives the function that moves it."""
    with progress(console) as shown:
        task = shown.add_task(title, total=total, completed=done)

        def update(now: int) -> None:
            speed = shown.tasks[0].speed
            rate = "" if not speed else f", {speed:,.{0 if speed >= 10 else 1}f} {unit}/s"
            shown.update(task, completed=min(now, total), description=f"{title}{rate}")

        yield update


LoadedPair = tuple[LoadedModel, LoadedModel]  # target and drafter


@dataclass(frozen=True)
class Output:
    """Where it writes."""

    out: str | None = None  # Run folder, where a stopped run goes on; none: runs/<experiment>-<time>.


@dataclass(frozen=True)
class Smoke:
    """Whether it is a trial."""

    smoke: bool = False  # Made-up traces or tiny random models, and little of them: shows that it runs, nothing more.


@dataclass(frozen=True)
class Models(ModelNames):
    """A pair of models by name."""

    drafter: str = "smollm2-drafter"
    """As target."""


@dataclass(frozen=True)
class Served(Models):
    """A pair of models as served."""

    dtype: str = "bfloat16"  # Dtype of both models: bfloat16, float16, float32 or int8.

    def __post_init__(self) -> None:
        check_fields(self)

    def load(self, console: Console, encoders: bool = False) -> LoadedPair:
        """Target and drafter, and the compilation cache switched on; models with an encoder only where they are served.
        A tiny random pair with --smoke. Raises ValueError, FileNotFoundError for no such model, vocabularies that
        cannot be joined, or an encoder."""
        if getattr(self, "smoke", False):
            return tiny_pair()
        if not encoders:
            refuse_encoders("this experiment", self.target, self.drafter)
        enable()
        download(self.target, self.drafter)
        with console.status("Loading the models"):
            target, drafter = load_model(self.target, dtype=self.dtype), load_drafter(self.drafter, dtype=self.dtype)
        drafter = for_target(target, drafter, say)
        check_reads(target.model, drafter.model)
        return target, drafter
