"""Texts for prompts, out of a wheel and a Debian package made here."""

import io
import json
import tarfile
import zipfile

from experiments import gather_texts

PASSAGE = "A passage of more than two hundred characters about nothing in particular. " * 4
QUESTION = "Wie hoch ist der höchste Berg der Alpen?"
QUOTES = """Ein langer Satz, der weit genug reicht.
\t\t-- Jemand
%
Kurz.
%
Noch ein Satz | mit Strich darin, der fehlt.
"""


def wheel(path, *, without=""):
    rows = {
        "schelling_point/wikipedia_5": [{"0": PASSAGE}, {"0": "too short"}],
        "schelling_point/owt_5": [{"0": PASSAGE + "News."}],
        "abstract2title/samples": [{"input": [{}, {"content": PASSAGE * 2}]}],
        "text_compression/samples": [
            {"text": PASSAGE * 2 + "x", "type": "c4"},
            {"text": PASSAGE * 3, "type": "github-code"},
        ],
        "german-exams-qa/samples": [{"input": [{}, {"content": QUESTION + "\nA. 4000\nB. 5000"}]}],
    }
    with zipfile.ZipFile(path, "w") as files:
        for name, entries in rows.items():
            if name != without:
                files.writestr(f"evals/registry/data/{name}.jsonl", "\n".join(map(json.dumps, entries)) + "\n")
    return path


def deb(path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as files:
        quotes = QUOTES.encode()
        for name in ("zitate", "zitate.u8", "asciiart"):
            entry = tarfile.TarInfo(f"./usr/share/games/fortunes/de/{name}")
            entry.size = len(quotes)
            files.addfile(entry, io.BytesIO(quotes))
    members = (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.getvalue()))
    body = b"!<arch>\n"
    for name, content in members:
        body += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    path.write_bytes(body)
    return path


def test_passages_and_sentences_are_found(tmp_path, capsys):
    passages, german, out = wheel(tmp_path / "w.whl"), deb(tmp_path / "f.deb"), tmp_path / "texts"
    assert gather_texts.main(["--passages", str(passages), "--german", str(german), "--out", str(out)]) == 0
    texts = {name: [json.loads(line)["text"] for line in (out / f"{name}.jsonl").read_text().splitlines()]
             for name in ("documents", "german")}  # fmt: skip
    assert len(texts["documents"]) == 4 and all(len(text) > 200 for text in texts["documents"])
    assert texts["german"] == ["Ein langer Satz, der weit genug reicht.", QUESTION]


def test_another_file_is_one_clear_error(tmp_path, capsys):
    good, other = deb(tmp_path / "f.deb"), tmp_path / "other.deb"
    other.write_bytes(b"no archive")
    for passages, german, said in (
        (wheel(tmp_path / "a.whl", without="schelling_point/owt_5"), good, "owt_5"),
        (wheel(tmp_path / "b.whl"), other, "other.deb is no Debian package"),
        (other, good, "other.deb"),
        (tmp_path / "none", good, "no such file"),
    ):
        assert gather_texts.main(["--passages", str(passages), "--german", str(german), "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("error:") or said
    assert not list(tmp_path.glob("*.jsonl"))
