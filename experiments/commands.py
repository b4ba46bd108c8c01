"""How an experiment's command line ends: one line on bad input, and an exit code."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import ParamSpec

P = ParamSpec("P")


def exit_codes(
    *also: type[Exception], interrupted: str | None = None
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """A `main` that ends with one line on standard error and 2 on ValueError, OSError and `also`.

    Args:
        interrupted: what Ctrl-C says before it ends with 130; none: it is raised.
    """

    def wrapped(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*given: P.args, **named: P.kwargs) -> int:
            try:
                return main(*given, **named)
            except (ValueError, OSError, *also) as error:
                print("error:", " ".join(str(error).split()), file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                if interrupted is None:
                    raise
                print(interrupted, file=sys.stderr)
                return 130

        return run

    return wrapped


def config_words(experiment: str, doc: str | None, arguments: Sequence[str] | None) -> list[str]:
    """The words of `python -m experiments.EXPERIMENT CONFIG.py [OPTIONS]`; none after --help, which is answered here.

    Raises:
        ValueError: the first word is no config.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    usage = f"python -m experiments.{experiment} CONFIG.py [OPTIONS]"
    if given and given[0] in ("-h", "--help"):
        print(f"usage: {usage}; CONFIG.py --help lists them\n\n{doc}")
        return []
    if not given or given[0].startswith("-"):
        raise ValueError(f"name a config first: {usage}")
    return given
