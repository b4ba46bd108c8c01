"""Decoding on a mesh of eight devices: tokens of one device, a share of the weights each, two all-reduces a layer."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import ended, launch

from specdec_jax.meshes import make_mesh

SCRIPT = Path(__file__).parent / "fixtures" / "on_eight_devices.py"
FLAGS = (  # eight devices, and programs that are compiled soon rather than run fast
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
LAYERS, WIDTHS, VOCAB = 2, (2, 5), 64
MESHES = (("llama", "data=2,model=4"), pytest.param("eight", "model=8", marks=pytest.mark.seldom))
PAIRS = ("eight", "shared", "reading", "uneven")  # everything else comes with llama


def reported(kind):
    """What the script says of a kind of pair, and of everything else where that is llama."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run([sys.executable, SCRIPT, kind], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Found(dict):
    """Reports by kind; the script runs when a kind is first read."""

    def __missing__(self, kind):
        self.update(reported(kind))
        return self[kind]


@pytest.fixture(scope="module")
def found():
    return Found(reported("llama"))


def sizes(words):
    named = dict(part.split("=") for part in words.split(","))
    return int(named.get("data", 1)), int(named.get("model", 1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [*MESHES, *(("shared", "data=2,model=4"), ("reading", "data=4,model=2")), ("uneven", "data=3,model=2")],
)
@pytest.mark.often(1)
def test_tokens_are_those_of_one_device(found, kind, words):
    """Of a batch decoded in part, refilled, decoded, cut back and extended; greedy and sampled rows."""
    assert found[kind][words]["tokens"] == found[kind][""]["tokens"]
    assert found[kind][words]["donated"]


@pytest.mark.parametrize(("kind", "words"), MESHES)
def test_every_device_holds_and_reads_its_share(found, kind, words):
    _, shares = sizes(words)
    for name, share in found[kind][words]["held"].items():
        whole = "norm" in name or name.endswith("output/bias") or name.endswith("down/bias")
        assert share == (1 if whole else 1 / shares), name
    for name, parts in found[kind][words]["read"].items():
        assert sorted(parts) == [1 / shares] * shares, name
    assert found[kind][words]["cache"] == 1 / 8


def test_every_family_is_shared(found):
    """Fused, turned and stacked tensors, read part by part; attention and MLP of each layer are divided."""
    assert len(found["families"]) >= 15
    for name, reported in found["families"].items():
        assert reported["alike"] and reported["back"] and reported["shared"] >= 6, name
        assert reported["int8"], name  # scales are those of whole rows, wherever their inputs are
        assert reported.get("apart", 0.0) < 1e-5, name
    assert sum("apart" in reported for reported in found["families"].values()) == 3


@pytest.mark.often(1)
@pytest.mark.parametrize("kind", ["llama", *PAIRS])
def test_bytes_of_caches_are_estimated(found, kind):
    """What a device has of a batch that has decoded, and of one whose rows wait for their first prompts."""
    for words, there in found[kind].items():
        if words:
            reported, *held = there["bytes"]
            assert held == [reported, reported], words


@pytest.mark.seldom
def test_what_devices_cannot_share_evenly_is_whole(found):
    held = found["uneven"]["data=3,model=2"]["held"]
    assert held["embedding"] == held["layer_0/attention/qkv/kernel"] == held["layer_0/attention/output/kernel"] == 1.0
    assert held["layer_0/mlp/gate_up/kernel"] == held["layer_0/mlp/down/kernel"] == 1 / 2


@pytest.mark.parametrize(("kind", "words"), MESHES)
def test_collectives_of_a_round(found, kind, words):
    """A target pass has two all-reduces a layer and one of the embedding, and gathers logits; else only scalars.

    Scalars pass between groups of rows: whether one drafts, lags or truncates, the longest draft, widest bisections.
    """
    rows, shares = sizes(words)
    kinds = Counter(kind for kind, _ in found[kind][words]["collectives"])
    scalars = sum(shape.endswith("[]") for _, shape in found[kind][words]["collectives"])
    passes = len(WIDTHS) if shares > 1 else 0
    expected = {"all-reduce": passes * (2 * LAYERS + 1) + scalars} | ({"all-gather": passes} if passes else {})
    assert kinds == Counter(expected)
    assert scalars <= (14 if rows > 1 else 0)
    gathered = [shape for kind, shape in found[kind][words]["collectives"] if kind == "all-gather"]
    assert gathered == [f"f32[{8 // rows},{width},{VOCAB}]" for width in WIDTHS][: len(gathered)]


@pytest.mark.seldom
def test_a_shared_drafter(found):
    """A pass of it costs what one of the target does; feeding ends at the last layer's keys and values."""
    there = found["shared"]["data=2,model=4"]
    assert there["drafter"] == [1 / 4, 1 / 8] and found["llama"]["data=2,model=4"]["drafter"] == [1, 1 / 2]
    target = Counter(map(tuple, found["llama"]["data=2,model=4"]["collectives"]))
    fed = Counter({("all-reduce", "f32[4,16,24]"): 1 + 2 * (LAYERS - 1)})
    step = Counter({("all-reduce", "f32[4,2,24]"): 1 + 2 * LAYERS, ("all-gather", f"f32[4,2,{VOCAB}]"): 1})
    assert Counter(map(tuple, there["collectives"])) == target + fed + step


def test_a_drafter_is_shared_from_its_size_on(found):
    held, sizes = found["drafters"]
    assert held == [1 / 2, 1 / 2, 1.0, 1.0]
    assert all(reported == there for reported, there in sizes)
    target, shared, _, whole = (there for _, there in sizes)
    assert target == shared and whole / 2 < shared < 0.6 * whole  # norms are whole


def test_a_file_of_requests_on_a_mesh(found):
    """From the command line: weights of a folder in Hugging Face format, rows refilled."""
    files = found["files"]
    assert files["codes"] == [0, 0, 2] and files["devices"] == 8
    assert "a batch of 6 rows cannot be divided over data=4" in files["written"][2]
    assert "Traceback" not in files["written"][2] and "written" not in files["written"][2]
    assert files["written"][0] == files["written"][1] and files["written"][0].count("\n") == 7


def test_a_mesh_has_devices_of_every_process():
    devices = [SimpleNamespace(process_index=index, platform="cpu") for index in (0, 1)]
    with pytest.raises(ValueError, match="mesh 'data=1' has no device of process 2"):
        make_mesh("data=1", devices)


ON_PROCESSES = Path(__file__).parent / "fixtures" / "decode_on_all.py"
TWO_EACH = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(sys.path),
}


@pytest.mark.seldom
def test_rows_and_weights_over_processes_give_what_one_device_gives(tiny_folders, tmp_path):
    reports = []
    for count, mesh in ((1, []), (2, ["data=2,model=2"])):
        found = ended(launch(count, [ON_PROCESSES, *tiny_folders, *mesh], tmp_path, TWO_EACH), 300)
        assert not any(code for code, _ in found), found
        reports += [line for _, said in found for line in said.splitlines() if line.startswith("results ")]
    assert len(reports) == 3 and len(set(reports)) == 1
