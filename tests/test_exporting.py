"""An export loads with the same logits, in parts or whole; damaged parts are named; cards say what is given."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_weights as tiny

from experiments import parts
from specdec_jax.distillation import exporting
from specdec_jax.distillation.exporting import export, join_folder, join_parts, model_card, split_file
from specdec_jax.loading import load_model

CARD = "# A card\n"
KIB = 2**-10  # in MiB
TOKENS = np.random.default_rng(5).integers(0, tiny.CONFIG["vocab_size"], (2, 12))


def logits(loaded):
    cache = loaded.model.init_cache(loaded.params, *TOKENS.shape)
    return np.asarray(jax.jit(loaded.model.apply)(loaded.params, jnp.asarray(TOKENS, jnp.int32), cache)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("trained"), tiny.weights())


@pytest.fixture(scope="module")
def trained(folder):
    """Float32 master weights, which bfloat16 cannot hold exactly."""
    return load_model(folder, dtype="float32")


def export_model(path, model, **options):
    export(path, model.config, model.params, model.tokenizer, **({"card": CARD} | options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_gives_the_logits_of_its_dtype(tmp_path, folder, trained, dtype):
    export_model(tmp_path / "out", trained, dtype=dtype)
    expected = load_model(folder, dtype=dtype)
    for name in ("hf", "orbax"):
        again = load_model(tmp_path / "out" / name, dtype=dtype)
        np.testing.assert_array_equal(logits(again), logits(expected))
        assert again.config == trained.config and again.tokenizer.eos_ids == trained.tokenizer.eos_ids
        assert (tmp_path / "out" / name / "README.md").read_text() == CARD
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["dtype"] == dtype
    weights = load_model(tmp_path / "out" / "hf", dtype="float32").params["embedding"]  # as stored, not as asked for
    np.testing.assert_array_equal(weights, trained.params["embedding"].astype(dtype).astype(jnp.float32))


def test_an_export_in_parts_is_joined_to_the_same(tmp_path, trained):
    export_model(tmp_path / "whole", trained)
    export_model(tmp_path / "cut", trained, split_mib=16 * KIB)
    files = [file for file in (tmp_path / "cut").rglob("*") if file.is_file()]
    assert max(file.stat().st_size for file in files if not file.name.endswith(".parts.json")) == 16 * 2**10
    assert not (tmp_path / "cut" / "hf" / "model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load_model(tmp_path / "cut" / "hf")
    joined = join_folder(tmp_path / "cut")
    assert tmp_path / "cut" / "hf" / "model.safetensors" in joined
    assert any("orbax" in file.parts for file in joined)
    whole = (tmp_path / "whole" / "hf" / "model.safetensors").read_bytes()
    assert (tmp_path / "cut" / "hf" / "model.safetensors").read_bytes() == whole
    expected = logits(load_model(tmp_path / "whole" / "hf"))
    for name in ("hf", "orbax"):
        np.testing.assert_array_equal(logits(load_model(tmp_path / "cut" / name)), expected)


@pytest.mark.parametrize("name", ["hf", "orbax"])
def test_one_format_alone_is_the_folder_itself(tmp_path, folder, name):
    export_model(tmp_path / "out", load_model(folder), formats=(name,))
    assert (tmp_path / "out" / "README.md").read_text() == CARD
    np.testing.assert_array_equal(logits(load_model(tmp_path / "out")), logits(load_model(folder)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_replaces_only_when_asked(tmp_path, trained):
    export_model(tmp_path / "out", trained, formats=("hf",))
    with pytest.raises(FileExistsError, match="out exists"):
        export_model(tmp_path / "out", trained, formats=("hf",))
    export_model(tmp_path / "out", trained, formats=("hf",), card="# Another\n", overwrite=True)
    assert (tmp_path / "out" / "README.md").read_text() == "# Another\n"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"formats": ("hf", "orbx")}, "unknown export format 'orbx'; did you mean 'orbax'"),
        ({"formats": ()}, "export needs a format"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"split_mib": 0}, "size of a part must be positive, got 0"),
        ({"dtype": "float16"}, "parameter norm/scale is not finite in float16"),
    ],
)
def test_a_bad_export_leaves_nothing(tmp_path, trained, options, match):
    params = dict(trained.params) | {"norm": {"scale": trained.params["norm"]["scale"] + 1e6}}
    with pytest.raises(ValueError, match=match):
        export_model(tmp_path / "out", trained._replace(params=params), **options)
    assert list(tmp_path.iterdir()) == []


def test_transformers_reads_the_export(tmp_path, trained):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    export_model(tmp_path / "out", trained, dtype="float32", formats=("hf",))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = theirs(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(found, logits(trained), atol=1e-3)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
def test_parts_make_the_file_again(tmp_path, monkeypatch, size):
    monkeypatch.setattr(exporting, "BLOCK", 300)  # several blocks a part, and not a whole number of them
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "target.gguf").write_bytes(content)
    parts = split_file(tmp_path / "target.gguf", KIB, folder=tmp_path / "parts")
    assert [part.name for part in parts] == [f"target.gguf.part{i:03}" for i in range(max(1, -(-size // 1024)))]
    assert b"".join(part.read_bytes() for part in parts) == content
    assert all(part.stat().st_size <= 1024 for part in parts)
    index = json.loads((tmp_path / "parts" / "target.gguf.parts.json").read_text())
    assert (index["size"], index["sha256"]) == (size, hashlib.sha256(content).hexdigest())
    joined = join_parts(tmp_path / "parts" / "target.gguf.parts.json")
    assert joined == tmp_path / "parts" / "target.gguf" and joined.read_bytes() == content
    assert join_parts(tmp_path / "parts" / "target.gguf.parts.json") == joined  # there and right: nothing to do


@pytest.fixture
def cut(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(range(250)) * 12)
    split_file(tmp_path / "x.bin", KIB)
    (tmp_path / "x.bin").unlink()
    return tmp_path


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / "x.bin.parts.json").read_text())
    change(index)
    (folder / "x.bin.parts.json").write_text(json.dumps(index))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda f: (f / "x.bin.part001").unlink(), "x.bin.part001 is missing"),
        (lambda f: flip(f / "x.bin.part002"), "x.bin.part002 is damaged"),
        (lambda f: (f / "x.bin.part000").write_bytes(b"short"), "x.bin.part000 is damaged: its 5 bytes"),
        (lambda f: (f / "x.bin.part000").open("ab").write(b"more"), "x.bin.part000 is damaged: its 1028 bytes"),
        (lambda f: edit_index(f, lambda i: i.update(sha256="0" * 64)), "parts.json is damaged: its parts are right"),
        (lambda f: edit_index(f, lambda i: i["parts"].pop()), "parts.json is damaged: its parts are right"),
        (lambda f: edit_index(f, lambda i: i["parts"][0].pop("size")), "parts.json is damaged: KeyError"),
        (lambda f: edit_index(f, lambda i: i.update(file="../x.bin")), "'../x.bin' is no file's name"),
        (lambda f: edit_index(f, lambda i: i["parts"][0].update(file="/etc/hostname")), "hostname' is no file's name"),
        (lambda f: edit_index(f, lambda i: i.update(format=9)), "format 9; format 1 is served"),
        (lambda f: (f / "x.bin.parts.json").write_text("[]"), "parts.json is damaged"),
    ],
)
def test_what_is_missing_or_damaged_is_named_and_nothing_appears(cut, harm, match):
    harm(cut)
    names = sorted(path.name for path in cut.iterdir())
    with pytest.raises(ValueError, match=match):
        join_parts(cut / "x.bin.parts.json")
    assert sorted(path.name for path in cut.iterdir()) == names


def test_another_file_of_the_name_is_not_replaced(cut):
    (cut / "x.bin").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="x.bin exists and is not what x.bin.parts.json lists"):
        join_parts(cut / "x.bin.parts.json")
    assert (cut / "x.bin").read_bytes() == b"mine"


def test_a_second_cut_leaves_no_part_of_the_first(cut):
    (cut / "x.bin").write_bytes(b"a" * 1500)
    assert len(list(cut.glob("*.part0*"))) == 3
    split_file(cut / "x.bin", KIB)
    assert len(list(cut.glob("*.part0*"))) == 2
    assert join_parts(cut / "x.bin.parts.json").read_bytes() == b"a" * 1500


def test_a_cut_that_fails_leaves_no_parts(tmp_path, monkeypatch):
    (tmp_path / "x.bin").write_bytes(b"a" * 5000)
    copy, calls = exporting._copy, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return copy(*arguments)

    monkeypatch.setattr(exporting, "_copy", full)
    with pytest.raises(OSError, match=r"cannot write .*x.bin.part002: .*No space left"):
        split_file(tmp_path / "x.bin", KIB)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file to cut"):
        split_file(tmp_path / "none", 1)
    with pytest.raises(FileNotFoundError, match="no such list of parts"):
        join_parts(tmp_path / "none.parts.json")


def test_a_card_says_what_is_given():
    figures = {
        "qa": {"agreement": (0.412, 0.38, 0.444), "at 0.7": 0.5},
        "math|1": {"at 0.7": (0.25, float("nan"), 0.0)},
    }
    card = model_card(
        {
            "name": "small",
            "summary": "A drafter.",
            "parameters": 15_140_864,
            "base_model": "org/target: 1",
            "data": "4 M tokens.",
            "recipe": {"loss": "forward KL", "betas": (0.9, 0.95), "steps": 700},
            "figures": figures,
        }
    )
    header, rest = card.removeprefix("---\n").split("\n---\n")
    fields = dict(line.split(": ", 1) for line in header.splitlines())
    assert json.loads(fields["license"]) == "apache-2.0" and json.loads(fields["base_model"]) == "org/target: 1"
    assert rest.strip().split("\n\n") == [
        "# small",
        "A drafter.",
        "- parameters: 15,140,864",
        "## Data",
        "4 M tokens.",
        "## Recipe",
        "- loss: forward KL\n- betas: 0.9, 0.95\n- steps: 700",
        "## Figures",
        "| task | agreement | at 0.7 |\n| --- | --- | --- |\n| qa | 0.41 [0.38, 0.44] | 0.5 |\n| math\\|1 | – | 0.25 |",
    ]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"summary": "x"}, "needs a name"),
        ({"name": "x", "reciep": "y"}, "no field 'reciep'; did you mean 'recipe'"),
        ({"name": "x", "figures": {"qa": 0.5}}, "map a task to a mapping"),
    ],
)
def test_a_card_refuses_what_it_cannot_say(fields, match):
    with pytest.raises(ValueError, match=match):
        model_card(fields)


def test_a_card_takes_a_table_that_is_written_already():
    assert model_card({"name": "x", "figures": "| a |\n| --- |"}).endswith("## Figures\n\n| a |\n| --- |\n")


def test_the_command_cuts_and_joins(tmp_path, capsys):
    source = tmp_path / "weights.bin"
    source.write_bytes(bytes(range(256)) * 9000)
    assert parts.main(["split", str(source), "--mib", "1", "--out", str(tmp_path / "away")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert parts.main(["join", str(tmp_path / "away")]) == 0
    assert (tmp_path / "away" / "weights.bin").read_bytes() == source.read_bytes()
    for wrong, said in ((["split", str(tmp_path / "none")], "none"), (["join", str(tmp_path / "empty")], "no list")):
        assert parts.main(wrong) == 2 and said in capsys.readouterr().err
