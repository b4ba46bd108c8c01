"""Hub ids against a small server of the hub's layout: what is asked for, and what is refused."""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_t5
import tiny_weights as tiny
from fake_hub import FakeHub
from huggingface_hub import constants
from refusals import assert_says, refusal
from rich.console import Console

from experiments.lib.commands import Served
from specdec_jax.app import cli
from specdec_jax.loading import download, hub, load_model

SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SINGLE = "model.safetensors"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
FALCON = json.dumps(tiny.CONFIG | {"model_type": "falcon"}).encode()
QUANTISED = json.dumps(tiny.CONFIG | {"quantization_config": {"quant_method": "gptq"}}).encode()


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The model in one file."""
    return read(tiny.write_folder(tmp_path_factory.mktemp("one"), tiny.weights()))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The same in three."""
    return read(tiny.write_folder(tmp_path_factory.mktemp("three"), tiny.weights(), shards=3))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub without models, as huggingface_hub's endpoint, with an empty cache and nobody logged in."""
    with FakeHub().running() as found:
        settings = {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": found.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield found


def drafted(loaded) -> int:
    return loaded.params.kernel.shape[0]


# What is asked for


def test_a_tokenizer_of_bytes_needs_no_file(server, tmp_path):
    """ByT5 has no tokenizer.json; any other model without one is refused before its weights come."""
    target, _ = tiny_t5.write_pair(tmp_path / "t5", of_bytes=True)
    server.add("org/byt5", Path(target))
    assert load_model("org/byt5").tokenizer.encode("hé", add_special=True) == [107, 198, 172, 1]
    assert sorted(server.sent()) == ["config.json", SINGLE]
    (Path(target) / "config.json").write_text(json.dumps(tiny_t5.CONFIG.to_hf()))
    server.add("org/t5", Path(target))
    assert_says(refusal("org/t5"), "the hub's 'org/t5' has no tokenizer.json")


def test_only_what_is_read_is_downloaded_and_once(server, shards):
    names = ("README.md", "consolidated.safetensors", "pytorch_model.bin", "model.gguf", "onnx/model.onnx")
    names += ("original/model.safetensors", "original/config.json", "model.fp16.safetensors")
    others = dict.fromkeys([*names, "model-00004-of-00003.safetensors"], b"1")
    more = {
        "generation_config.json": b'{"eos_token_id": [2, 7]}',
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"a",
        "additional_chat_templates/tool_use.jinja": b"b",
    }
    server.add("org/tiny", shards | others | more)
    loaded = load_model("org/tiny", dtype="float32")
    assert sorted(server.sent()) == sorted([*shards, *more])
    assert loaded.name == "org/tiny" and loaded.tokenizer.eos_ids == (2, 7)
    assert (loaded.tokenizer.chat_template, loaded.tokenizer.tool_template) == ("a", "b")
    before = len(server.asked)
    load_model("org/tiny", dtype="float32")
    assert [one.path for one in server.asked[before:]] == ["/api/models/org/tiny/revision/main"]


def test_revisions_are_branches_tags_references_and_commits(server, files, tmp_path):
    norms = {"main": 1.0, "v1.0": 2.0, "refs/pr/1": 3.0, "8192": 4.0}
    commits = {}
    for revision, value in norms.items():
        named = tiny.weights() | {"model.norm.weight": np.full(64, value, np.float32)}
        commits[revision] = server.add("org/tiny", read(tiny.write_folder(tmp_path / revision, named)), revision)

    def norm(source, **options):
        params = load_model(source, dtype="float32", **options).params
        return float(params["norm"]["scale"][0])

    assert norm("org/tiny") == 1
    assert norm("org/tiny@v1.0") == norm("org/tiny", revision="v1.0") == 2
    assert norm("org/tiny@refs/pr/1") == 3
    assert norm(f"org/tiny@{commits['v1.0']}") == 2
    assert norm("org/tiny", revision="8192") == norm(f"org/tiny@{commits['8192']}") == 4
    before = len(server.asked)
    assert norm(f"org/tiny@{commits['v1.0']}") == 2 and len(server.asked) == before


def test_a_draft_vocabulary_comes_behind_the_revision(server, files, tmp_path):
    ranking = io.BytesIO()
    np.save(ranking, np.arange(20, 60))
    server.add("org/tiny", files | {"token_ranking.npy": ranking.getvalue()}, "v1")
    server.add("org/tiny", files)
    loaded = load_model("org/tiny@v1@30")
    assert (loaded.name, drafted(loaded)) == ("org/tiny@v1@30", 30)
    np.save(tmp_path / "own.npy", np.arange(20, 30))
    assert drafted(load_model(f"org/tiny@v1@{tmp_path / 'own.npy'}")) == 10
    said = refusal("org/tiny@30")
    assert_says(said, "@30 needs a ranking", "a revision that is a number is given by its commit")


def test_a_missing_file_is_no_hub_id(server):
    download("prompt_lookup(longest=3)", "none", "my/rule.py", "my/model.gguf", "smollm2-drafter@8192")
    assert server.asked == []


# What is refused: (source, changes to its files, token, what the message names)

NOWHERE = "there is no file or folder 'org/none' here"
REFUSALS = {
    "family": ("org/tiny", {"config.json": FALCON}, None, ["unknown model_type 'falcon'", "docs/extending.md"]),
    "quantised": ("org/tiny", {"config.json": QUANTISED}, None, ["config.json", "quantised", "'gptq'"]),
    "pytorch": ("org/tiny", {SINGLE: None, "a.bin": b"1"}, None, [f"'org/tiny' has no {SINGLE}", "save_pretrained"]),
    "tokenizer": ("org/tiny", {"tokenizer.json": None}, None, ["'org/tiny' has no tokenizer.json"]),
    "no config": ("org/tiny", {"config.json": None}, None, ["no config.json"]),
    "revision": ("org/tiny@v9", {}, None, ["'org/tiny@v9'", "Invalid rev id: v9"]),
    "of a built-in": ("smollm2-drafter@main", {}, None, ["'smollm2-drafter@main'", "or the revision of a hub id"]),
    "no such model": ("org/none", {}, None, [NOWHERE, "Repository Not Found", "authenticated"]),
    "bad token": ("org/none", {}, "bad", [NOWHERE, "Invalid credentials"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_what_is_wrong_and_no_weights_were_downloaded(server, files, monkeypatch, capfd, case):
    source, changes, token, parts = REFUSALS[case]
    server.add("org/tiny", {name: content for name, content in (files | changes).items() if content is not None})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert_says(refusal(source), *parts)
    assert not any(one.path.startswith("/cdn/") for one in server.asked) and capfd.readouterr().err == ""


def test_an_encoder_is_refused_before_its_weights_are_downloaded(server, files, tmp_path):
    target, _ = tiny_t5.write_pair(tmp_path / "t5")
    server.add("org/t5", Path(target))
    server.add("org/tiny", files)
    config = Served(target="org/tiny", drafter="org/t5", dtype="float32")
    with pytest.raises(ValueError, match="does not serve models with an encoder, such as T5, and 'org/t5' has one"):
        config.load(Console(file=io.StringIO()))
    assert not any(one.path.startswith("/cdn/") for one in server.asked)


# Who may read it


def test_a_gated_model_needs_a_token_of_a_reader(server, files, monkeypatch):
    server.tokens = {"mine", "stranger"}
    server.add("org/tiny", files, gated="manual", readers=("mine",))
    assert_says(refusal("org/tiny"), "Access to model org/tiny is restricted", "authenticated")
    monkeypatch.setenv("HF_TOKEN", "stranger")
    assert_says(refusal("org/tiny"), "Access to model org/tiny is restricted")
    monkeypatch.setenv("HF_TOKEN", "mine")
    load_model("org/tiny")
    assert [one.token for one in server.asked if one.path.startswith("/cdn/")] == [None]  # of another host


def test_a_connection_that_stays_broken_leaves_what_is_whole(server, shards):
    server.add("org/tiny", shards)
    last = hashlib.sha256(shards[SHARDS[2]]).hexdigest()
    server.broken = last
    assert_says(refusal("org/tiny"), "'org/tiny'", "lacks files of the hub's")
    server.broken = None
    before = len(server.asked)
    load_model("org/tiny")
    assert [one.path for one in server.asked[before:] if one.path.startswith("/cdn/")] == [f"/cdn/{last}"]


# Without the hub


def test_without_the_hub_the_cache_is_read_and_half_a_model_is_refused(server, shards, monkeypatch, tmp_path):
    server.add("org/tiny", shards, "v1")
    load_model("org/tiny@v1")
    before = len(server.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model("org/tiny@v1").name == "org/tiny@v1"
    assert_says(refusal("org/other@v1"), "no file or folder 'org/other@v1' here", "HF_HUB_OFFLINE")
    assert len(server.asked) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    load_model("org/tiny@v1")
    assert_says(refusal("org/other"), "no file or folder 'org/other' here", "Connect")
    (path,) = (tmp_path / "cache").glob(f"*/snapshots/*/{SHARDS[1]}")
    path.unlink()
    assert_says(refusal("org/tiny@v1"), "the cache lacks files of the hub's")


# What is seen of it


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_command_line_takes_revisions_and_downloads_before_it_draws_a_spinner(server, files, monkeypatch, capsys):
    server.add("org/tiny", files, "v1")
    sent = []

    def built(*_):
        raise OSError("enough")

    monkeypatch.setattr("specdec_jax.app.settings.build", built)
    monkeypatch.setattr("specdec_jax.app.views.printing.status", lambda _: sent.append(server.sent()) or Terminal())
    assert cli.main(["generate", "hello", "--target", "org/tiny@v1", "--drafter", "ngram,org/tiny@v1"]) == 2
    assert capsys.readouterr().err == "error: enough\n"
    assert sorted(sent[0]) == sorted([*SMALL, SINGLE])


# huggingface_hub reads its environment once, when it is imported

LOAD = "from specdec_jax.loading import load_model; print(load_model('org/tiny@v1').config.hidden_size)"


def load_elsewhere(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(hub.__file__).parents[2])
    given = {**os.environ, "PYTHONPATH": root, "HF_HOME": str(cache), **environment}
    given.pop("HF_HUB_CACHE", None)
    return subprocess.run([sys.executable, "-c", LOAD], env=given, capture_output=True, text=True, timeout=300)


def test_a_mirror_a_token_and_offline_mode_by_the_environment(server, files, tmp_path):
    server.tokens = {"mine"}
    server.add("org/tiny", files, "v1", gated="auto", readers=("mine",))
    done = load_elsewhere(tmp_path, HF_ENDPOINT=server.url, HF_TOKEN="mine")
    assert (done.returncode, done.stdout) == (0, "64\n")
    assert sorted(server.sent()) == sorted([*SMALL, SINGLE])
    before = len(server.asked)
    again = load_elsewhere(tmp_path, HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout, again.stderr) == (0, "64\n", "")
    assert len(server.asked) == before
