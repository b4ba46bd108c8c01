"""Hub ids: what is asked of huggingface_hub, and what is refused before weights are downloaded."""

import inspect
import io
import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import tiny_t5
import tiny_weights as tiny
from huggingface_hub import constants, utils
from refusals import assert_says, refusal
from rich.console import Console

from experiments.lib.commands import Served
from specdec_jax.app import cli
from specdec_jax.loading import download, load_model

SINGLE, SHARD = "model.safetensors", "model-00002-of-00003.safetensors"
SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def config(**changes):
    return json.dumps(tiny.CONFIG | changes).encode()


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read(tiny.write_folder(tmp_path_factory.mktemp("one"), tiny.weights()))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return read(tiny.write_folder(tmp_path_factory.mktemp("three"), tiny.weights(), shards=3))


class Hub(dict):
    """Files by name by (repository, revision) in place of the hub; `sent` lists those downloaded, `asked` the calls."""

    def __init__(self, cache):
        self.cache, self.sent, self.asked = cache, [], []
        self.signature = inspect.signature(huggingface_hub.snapshot_download)

    def add(self, repository, files, revision="main"):
        self[repository, revision] = self[repository, f"commit-of-{revision.replace('/', '-')}"] = files

    def files_of(self, repository, revision):
        if (repository, revision or "main") not in self:
            raise OSError(f"Revision Not Found:\n{revision}")
        return self[repository, revision or "main"]

    def snapshot_download(self, *arguments, **options):
        given = self.signature.bind(*arguments, **options).arguments
        repository, revision = given["repo_id"], given["revision"] or "main"
        self.asked.append(revision)
        files = self.files_of(repository, revision)
        folder = self.cache / repository / f"commit-of-{revision.removeprefix('commit-of-').replace('/', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in utils.filter_repo_objects(files, allow_patterns=given["allow_patterns"]):
            if not (folder / name).is_file():
                self.sent.append(name)
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(files[name])
        return str(folder)

    def model_info(self, _, repository, revision):
        names = self.files_of(repository, revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *given, **named: made.model_info(*given, **named))
    return made


def num_drafted(loaded) -> int:
    return loaded.params.kernel.shape[0]


def test_a_tokenizer_of_bytes_needs_no_file(hub, tmp_path):
    target, _ = tiny_t5.write_pair(tmp_path / "t5", of_bytes=True)
    hub.add("org/byt5", read(target))
    assert load_model("org/byt5").tokenizer.encode("hé", add_special=True) == [107, 198, 172, 1]
    assert hub.sent == ["config.json", SINGLE]


def test_only_what_is_read_is_downloaded_and_once(hub, shards):
    names = ("README.md", "consolidated.safetensors", "pytorch_model.bin", "model.gguf", "onnx/model.onnx")
    names += ("original/model.safetensors", "original/config.json", "model.fp16.safetensors")
    others = dict.fromkeys([*names, "model-00004-of-00003.safetensors"], b"1")
    more = {
        "generation_config.json": b'{"eos_token_id": [2, 7]}',
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"a",
        "additional_chat_templates/tool_use.jinja": b"b",
    }
    hub.add("org/tiny", shards | others | more)
    for _ in range(2):
        loaded = load_model("org/tiny", dtype="float32")
        assert sorted(hub.sent) == sorted([*shards, *more])
    assert hub.asked == ["main", "commit-of-main", "main"]
    assert loaded.name == "org/tiny" and loaded.tokenizer.eos_ids == (2, 7)
    assert (loaded.tokenizer.chat_template, loaded.tokenizer.tool_template) == ("a", "b")


def test_a_revision_stands_behind_the_id_or_is_an_option(hub, tmp_path):
    for number, revision in enumerate(("main", "v1.0", "refs/pr/1", "8192")):
        named = tiny.weights() | {"model.norm.weight": np.full(64, number, np.float32)}
        hub.add("org/tiny", read(tiny.write_folder(tmp_path / revision, named)), revision)

    def norm(source, **options):
        return float(load_model(source, dtype="float32", **options).params["norm"]["scale"][0])

    assert [norm("org/tiny"), norm("org/tiny@v1.0"), norm("org/tiny", revision="v1.0")] == [0, 1, 1]
    assert [norm("org/tiny@refs/pr/1"), norm("org/tiny", revision="8192")] == [2, 3]


def test_a_draft_vocabulary_comes_behind_the_revision(hub, files, tmp_path):
    ranking = io.BytesIO()
    np.save(ranking, np.arange(20, 60))
    hub.add("org/tiny", files | {"token_ranking.npy": ranking.getvalue()}, "v1")
    hub.add("org/tiny", files)
    loaded = load_model("org/tiny@v1@30")
    assert (loaded.name, num_drafted(loaded)) == ("org/tiny@v1@30", 30)
    np.save(tmp_path / "own.npy", np.arange(20, 30))
    assert num_drafted(load_model(f"org/tiny@v1@{tmp_path / 'own.npy'}")) == 10
    assert_says(refusal("org/tiny@30"), "@30 needs a ranking", "a revision that is a number is given by its commit")


def test_a_missing_file_is_no_hub_id(hub):
    download("prompt_lookup(longest=3)", "none", "my/rule.py", "my/model.gguf", "smollm2-drafter@8192")
    assert hub.asked == []


REFUSALS = {  # (source, changes to its files, what the message names)
    "family": ("org/tiny", {"config.json": config(model_type="falcon")}, ["'falcon'", "extending.md"]),
    "quantised": ("org/tiny", {"config.json": config(quantization_config={"quant_method": "gptq"})}, ["quantised"]),
    "pytorch": ("org/tiny", {SINGLE: None, "a.bin": b"1"}, [f"'org/tiny' has no {SINGLE}", "save_pretrained"]),
    "tokenizer": ("org/tiny", {"tokenizer.json": None}, ["'org/tiny' has no tokenizer.json"]),
    "no config": ("org/tiny", {"config.json": None}, ["no config.json"]),
    "revision": ("org/tiny@v9", {}, ["no file or folder 'org/tiny@v9' here", "hub's: Revision Not Found: v9"]),
    "of a built-in": ("smollm2-drafter@main", {}, ["'smollm2-drafter@main'", "or the revision of a hub id"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_what_is_wrong_and_no_weights_were_downloaded(hub, files, capfd, case):
    source, changes, parts = REFUSALS[case]
    hub.add("org/tiny", {name: content for name, content in (files | changes).items() if content is not None})
    assert_says(refusal(source), *parts)
    assert {*hub.sent} <= {*SMALL} and capfd.readouterr().err == ""


def test_an_encoder_is_refused_before_its_weights_are_downloaded(hub, files, tmp_path):
    hub.add("org/t5", read(tiny_t5.write_pair(tmp_path / "t5")[0]))
    hub.add("org/tiny", files)
    served = Served(target="org/tiny", drafter="org/t5", dtype="float32")
    with pytest.raises(ValueError, match="does not serve models with an encoder, such as T5, and 'org/t5' has one"):
        served.load(Console(file=io.StringIO()))
    assert {*hub.sent} <= {*SMALL}


def test_without_the_hub_the_cache_is_read_and_half_a_model_is_refused(monkeypatch, tmp_path):
    """By huggingface_hub itself, first in its offline mode, then without a connection."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    tiny.write_folder(snapshot, tiny.weights(), shards=3)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for offline, reason in ((True, "HF_HUB_OFFLINE"), (False, "Connect")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert load_model("org/tiny@v1").name == "org/tiny@v1"
        assert_says(refusal("org/other@v1"), "no file or folder 'org/other@v1' here", reason)
    (snapshot / SHARD).unlink()
    assert_says(refusal("org/tiny@v1"), "the cache lacks files of the hub's")


def test_the_command_line_takes_revisions_and_downloads_before_it_draws_a_spinner(hub, files, monkeypatch, capsys):
    hub.add("org/tiny", files, "v1")
    sent = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def built(*_):
        raise OSError("enough")

    monkeypatch.setattr("specdec_jax.app.settings.build", built)
    monkeypatch.setattr("specdec_jax.app.views.printing.status", lambda _: sent.extend(hub.sent) or Terminal())
    assert cli.main(["generate", "hello", "--target", "org/tiny@v1", "--drafter", "ngram,org/tiny@v1"]) == 2
    assert capsys.readouterr().err == "error: enough\n"
    assert sorted(sent) == sorted([*SMALL, SINGLE])
