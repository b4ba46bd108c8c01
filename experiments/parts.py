"""Files in parts small enough to travel: cut here, joined there, every byte checked.

Command:   python -m experiments.parts split FILE --mib 16 --out FOLDER
           python -m experiments.parts join FOLDER
Time:      seconds

For machines that are lent for minutes and take or give files of a few MiB: a target on the way there, an exported
drafter on the way back (`experiments.distill --split-mib` cuts it at once).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.commands import exit_codes, told
from specdec_jax.distillation.exporting import join_folder, split_file


@dataclass(frozen=True)
class Split:
    """Cut a file into parts."""

    file: tyro.conf.Positional[Path]
    """What to cut; it stays."""
    mib: float = 16.0
    """Most MiB of a part."""
    out: Path | None = None
    """Folder of the parts; none: the file's own."""


@dataclass(frozen=True)
class Join:
    """Put the files of a folder together again."""

    folder: tyro.conf.Positional[Path]
    """Where the parts and their lists are."""


Command = Annotated[Split, tyro.conf.subcommand("split")] | Annotated[Join, tyro.conf.subcommand("join")]


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Cuts or joins; 2 on bad input."""
    command = told(Command, __doc__, arguments, "python -m experiments.parts")
    if isinstance(command, Split):
        made = split_file(command.file, command.mib, folder=command.out)
    else:
        made = join_folder(command.folder)
        if not made:
            raise ValueError(f"{command.folder} holds no list of parts")
    print("\n".join(map(str, made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
