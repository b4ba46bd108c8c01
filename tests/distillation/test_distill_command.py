"""`python -m experiments.distill` from target to drafter; killed at any moment, it goes on to the same weights."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launched import ended, launch
from safetensors.numpy import load_file
from test_sharding import FLAGS
from tiny_pair import change_json, write_pair

from configs import distill_smollm2_reading as reading_config_file
from configs.base import load_config
from experiments import distill
from experiments.lib import distill_train
from specdec_jax import SamplingParams, generate, load_model
from specdec_jax.distillation import training
from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.writing import BY_ASSISTANT, GIVEN
from specdec_jax.loading.draft_vocabulary import RANKING
from specdec_jax.locks import locked
from specdec_jax.meshes import make_mesh
from specdec_jax.metrics.judging import answers
from specdec_jax.metrics.judging import judge as judge_texts
from specdec_jax.models import gpt2
from specdec_jax.stopping import static
from specdec_jax.text.generation import encode

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
from configs.base_distillation import DistillConfig
from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.conversations import Pool
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.training import Schedule

config = DistillConfig(
    name="tiny", target={target!r}, tokens=1200, texts="nowhere", held_out=(), judge=({prompts!r},), judge_tokens=8,
    openings={openings!r},
    short=Pool(4, 48, 64), long=Pool(2, 64, 64), cycle=("short", "short", "long"), labels=4,
    shape=Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, hidden=48),
    packing=Packing(slots=(48, 96), tokens=192, candidates=64, sampled=16), chunk=48, validation=1,
    schedule=Schedule(steps=12, warmup=2), intervals=Intervals(save_every=2, log_every=3), dtype="float32", seed=5,
)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folders):
    folder = tmp_path_factory.mktemp("distill")
    prompts = folder / "prompts.jsonl"
    lines = [{"id": i, "category": c, "turns": [t]} for i, (c, t) in enumerate([("qa", "hello"), ("writing", "he he")])]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    kinds = [{"kind": "a", "texts": ["hello", "he {n}"]}, {"kind": "b", "texts": ["he hello"], "long": True}]
    openings = folder / "openings.json"
    openings.write_text(json.dumps({"openings": kinds}))
    config = folder / "config.py"
    config.write_text(CONFIG.format(target=tiny_folders[0], prompts=str(prompts), openings=str(openings)))
    return folder


def run(place, out, *words):
    return distill.main([str(place / "config.py"), "--out", str(out), *words])


def weights(out: Path) -> bytes:
    return (out / "drafter" / "model.safetensors").read_bytes()


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def manifest_of(out: Path) -> dict:
    return json.loads((out / "data" / "manifest.json").read_text())


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing stopped."""
    assert run(place, place / "whole") == 0
    return place / "whole"


def test_without_labels_the_target_runs_in_every_step(place, tmp_path):
    words = ["--labels", "0", "--packing.candidates", "0", "--shape.reads", "0", "1", "--judge-temperatures", "0"]
    assert run(place, tmp_path, *words) == 0
    assert all(entry["labels"] == 0 and "hidden" not in entry for entry in manifest_of(tmp_path)["shards"])
    assert "whole distributions" in (tmp_path / "drafter" / "README.md").read_text()
    figures = re.findall(r"\| tiny \| (\w+) \| (.+) \|", (tmp_path / "judge" / "table.md").read_text())
    assert [name for name, _ in figures] == ["agreement", "acceptance"]
    assert all(0 < float(each) < 1 for _, line in figures for each in line.split(" | "))


def test_a_run_leaves_data_curve_judgement_and_a_drafter_that_loads(place, whole, tmp_path, capsys):
    manifest = manifest_of(whole)
    assert manifest["tokens"] >= 1200 and {entry["rows"] for entry in manifest["shards"]} == {"short", "long"}
    lines = lines_of(whole / "train" / "metrics.jsonl")
    assert lines[-1]["step"] == 12 and "validation_acceptance" in lines[-1]
    assert (whole / "train" / "curve.png").stat().st_size > 5000
    judged = json.loads((whole / "judge" / "judgement.json").read_text())
    assert judged["step"] == 12 and set(judged["figures"]) == {"prompts, answers at 0", "prompts, answers at 0.7"}
    assert set(judged["figures"]["prompts, answers at 0"]) == {"qa", "chat", "macro"}
    hf, orbax = (load_model(whole / name, dtype="float32") for name in ("drafter", "drafter-orbax"))
    assert hf.config == orbax.config and hf.config.num_hidden_layers == 1
    card = (whole / "drafter" / "README.md").read_text()
    assert "12 steps" in card and "greedy agreement" in card
    path = shutil.copytree(whole, tmp_path / "run") / "train" / "training.json"
    path.write_text(json.dumps({"config": json.loads(path.read_text())["config"] | {"data": []}}))
    assert run(place, tmp_path / "run", "--stage", "train") == 2 and "another data" in capsys.readouterr().err


@pytest.mark.seldom
def test_a_drafter_of_another_family_comes_from_the_same_data(place, whole, tmp_path, tiny_folders):
    """Stopped after a step, gone on to the end, exported, loaded: it drafts what its target would write."""
    kind, out = gpt2.GPT2Config, tmp_path / "gpt2"
    shutil.copytree(whole / "data", out / "data")
    words = ["--shape.family", "gpt2", "--shape.kv-heads", "2", "--judge-temperatures", "0"]
    assert run(place, out, *words, "--stage", "train", "--intervals.minutes", "1e-9") == 0 == run(place, out, *words)
    assert [line["step"] for line in lines_of(out / "train" / "metrics.jsonl")] == [1, 2, 3, 4, 6, 8, 9, 10, 12]
    hf, orbax = (load_model(out / name, dtype="float32") for name in ("drafter", "drafter-orbax"))
    target = load_model(tiny_folders[0], dtype="float32")
    assert type(hf.config) is type(orbax.config) is kind and hf.config == orbax.config
    assert hf.config.context == target.config.context and hf.tokenizer.eos_ids == target.tokenizer.eos_ids
    sampling, options = SamplingParams(24), {"target": target, "chat": False, "costs": "estimated"}
    plain = generate("hello he", sampling, drafter=None, **options)
    drafted = generate("hello he", sampling, drafter=hf, policy=static(draft_length=3), **options)
    assert drafted.tokens == plain.tokens and drafted.statistics["num_draft_tokens"] > 0
    config = load_config(place / "config.py")
    shape = dataclasses.replace(config.shape, reads=(1,))
    reads = dataclasses.replace(config, shape=shape, start_from=str(out / "drafter"))
    with pytest.raises(ValueError, match=f"reads is for .* family 'llama', start_from .* is a {kind.__name__}"):
        distill_train.initial_state(reads, target, None)


def test_smoke_makes_the_config_small_and_other_options_overrule_it(place, monkeypatch):
    asked = []
    monkeypatch.setattr(distill, "distill", lambda config, stages, console, share: asked.append((config, stages)))
    assert distill.main([str(place / "config.py"), "--smoke", "--schedule.steps", "3", "--stage", "write"]) == 0
    ((made, stages),) = asked
    assert (made.name, made.schedule.steps, made.cycle, stages) == ("tiny-smoke", 3, ("short",), ["write"])
    assert made.shape == load_config(place / "config.py").shape
    assert made.judge[0].endswith("prompts.jsonl:6")


def test_every_committed_config_can_be_made_small():
    for path in sorted((ROOT / "configs").glob("distill_smollm2*.py")):
        made = distill.small(load_config(path))
        assert made.tokens < 5000 and made.schedule.steps == 10 and made.name.endswith("-smoke")


def test_a_finished_run_does_nothing_again(place, whole, capsys):
    before = weights(whole)
    assert run(place, whole, "--stage", "write", "--stage", "train") == 0
    assert "are there" in capsys.readouterr().out and weights(whole) == before


def test_other_settings_and_a_folder_in_use_are_refused(place, whole, capsys):
    for arguments, said in (
        (["--seed", "6"], "seed"),
        (["--stage", "train", "--schedule.rate", "0.1"], "schedule"),
        (["--stage", "train", "--labels", "5"], "has 4 labels per position, labels is 5: run --stage label"),
    ):
        assert run(place, whole, *arguments) == 2 and said in capsys.readouterr().err
    with locked(whole):
        assert run(place, whole) == 2
    assert f"in use by another process (pid {os.getpid()})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--held-out", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--stage", "train"], "holds no shards"),
        (["--stage", "judge"], "no checkpoint"),
    ],
)
def test_bad_input_is_one_line(place, tmp_path, capsys, arguments, said):
    assert run(place, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error:") and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.seldom
def test_killed_at_any_moment_it_goes_on_to_the_same_weights(place, whole):
    """SIGKILL while it writes and while it trains, then once to the end."""
    out, moments = place / "killed", random.Random(0)
    command = [sys.executable, "-m", "experiments.distill", str(place / "config.py"), "--out", str(out)]
    for mark in ("data/manifest.json", "train/metrics.jsonl"):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 180
        while process.poll() is None and not (out / mark).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.8))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(out) == weights(whole) and manifest_of(out)["shards"] == manifest_of(whole)["shards"]
    assert not list(out.rglob("*.tmp*"))[2:]  # what a kill may leave: one file a stage at most


def test_what_a_drafter_reads_is_not_changed_by_training_on():
    base = reading_config_file.config
    shape = dataclasses.replace(base.shape, reads=(16, 22))
    config = dataclasses.replace(base, start_from="smollm2-drafter-reading", shape=shape)
    with pytest.raises(ValueError, match=r"'smollm2-drafter-reading' reads layers .*, shape.reads is \(16, 22\)"):
        distill_train.initial_state(config, None, None)


def assert_same_training(one, other):
    """The weights of two runs but for the order of sums, which were exported in bfloat16, and their metrics."""
    left, right = (load_file(out / "drafter" / "model.safetensors") for out in (one, other))
    for name, tensor in left.items():
        np.testing.assert_allclose(tensor, right[name], rtol=2**-7, atol=2e-4, err_msg=name)
    last = [lines_of(out / "train" / "metrics.jsonl")[-1] for out in (one, other)]
    for figure in {"loss", "agreement", "gradient_norm", "positions", "validation_loss", "last_agreement"} & {*last[0]}:
        assert last[0][figure] == pytest.approx(last[1][figure], rel=1e-3, abs=1e-4), figure


ON_DEVICES = Path(__file__).resolve().parents[1] / "fixtures" / "distil_on_devices.py"
READS = ", hidden_layers=(0, 1), unroll=Unroll(2, 1.0)"


@pytest.mark.seldom
@pytest.mark.parametrize("labels", ["stored", "online"])
def test_a_mesh_writes_the_tokens_labels_and_weights_of_one_device(place, labels):
    """Of a drafter that reads its target: of one that does not, less is shared."""
    folder = place / f"reads-{labels}"
    folder.mkdir()
    text = (place / "config.py").read_text()
    text = text.replace("hidden=48)", "hidden=48, reads=(0, 1))").replace(", seed=5", f", seed=5{READS}")
    if labels == "online":  # the target runs in every step
        for stored in ("labels=4", "candidates=64", "hidden_layers=(0, 1)"):
            assert stored in text
            text = text.replace(stored, re.sub(r"\d+|\(.*\)", "()" if "(" in stored else "0", stored))
    (folder / "config.py").write_text("from specdec_jax.distillation.unrolled import Unroll\n" + text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    words = [sys.executable, ON_DEVICES, folder / "config.py", folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    one, mesh = (manifest_of(folder / name) for name in ("one", "mesh"))
    assert one["tokens"] == mesh["tokens"] > 1000
    for entry, other in zip(one["shards"], mesh["shards"], strict=True):
        left, right = (load_file(folder / name / "data" / entry["file"]) for name in ("one", "mesh"))
        np.testing.assert_array_equal(left["tokens"], right["tokens"])
        np.testing.assert_allclose(left["log_prob"], right["log_prob"], atol=2e-3)
        assert entry["file"] == other["file"]
    assert_same_training(folder / "one", folder / "mesh")


@pytest.mark.parametrize("shares, tokens", [(2, None), (3, 2688)])
def test_rows_that_devices_cannot_share_are_refused(shares, tokens, monkeypatch):
    monkeypatch.setattr(training, "row_groups", lambda: shares)
    packing = Packing(slots=(448, 896), tokens=1792)
    if tokens is None:
        return training.check_rows(packing)
    refusal_text = f"4 rows of 448 tokens .* data={shares}: set packing.tokens to {tokens}$"
    with pytest.raises(ValueError, match=refusal_text):
        training.check_rows(packing)
    training.check_rows(Packing(slots=(448, 896), tokens=tokens))


@pytest.mark.seldom
def test_two_processes_write_the_data_and_weights_of_one(place, whole):
    """One of them is killed as it trains; a second launch goes on to the end."""
    out = place / "both"
    out.mkdir()
    command = ["-m", "experiments.distill", place / "config.py", "--out", out]
    running = launch(2, command, out)
    until = time.monotonic() + 240
    while not (out / "train" / "metrics.jsonl").is_file():
        assert time.monotonic() < until, ended(running, 1)
        time.sleep(0.02)
    running[1][0].send_signal(signal.SIGKILL)
    code, said = ended(running, 60)[0]
    assert code == 2 and said.count("error: ") == 1 and "Traceback" not in said, said
    assert "process 2 of 2 has ended before the work was done" in said and not (out / "drafter").exists()
    found = ended(launch(2, command, out))
    assert [code for code, _ in found] == [0, 0], found
    assert "Written to" in found[0][1] and "Written to" not in found[1][1]
    assert manifest_of(out)["shards"] == manifest_of(whole)["shards"] and len(manifest_of(out)["shards"]) > 3
    assert not list((out / "data").glob(".0*.lock"))
    assert_same_training(whole, out)
    steps = [[line["step"] for line in lines_of(run / "train" / "metrics.jsonl")] for run in (whole, out)]
    assert steps[0] == steps[1]


def test_labels_must_be_written(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distill, "join", lambda: distill.Share(0, 2))
    monkeypatch.setattr(distill, "make_spanning_mesh", lambda words: make_mesh("data=1"))
    assert run(place, tmp_path, "--labels", "0", "--packing.candidates", "0", "--distributed") == 2
    assert "labels must be more than 0" in capsys.readouterr().err


@pytest.fixture
def judged(tmp_path):
    """Judges a drafter of texts at temperature 0 by the command: (target, drafter, agreement by task)."""
    names = write_pair(tmp_path)
    options = ["--prompts", str(tmp_path / "p.jsonl"), "--temperatures", "0", "--dtype", "float32"]

    def judge(texts, *words, **config):
        (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"text": text, "category": "code"}) for text in texts))
        change_json(Path(names[0]) / "config.json", **config)
        command = ["--target", names[0], "--drafter", names[1], *options, *words, "--out", str(tmp_path / "run")]
        assert distill.main(["judge", *command]) == 0
        found = {row["task"]: row["agreement"][0] for row in lines_of(tmp_path / "run" / "results.jsonl")}
        return *(load_model(name, dtype="float32") for name in names), found

    return judge


def test_a_drafter_is_judged_as_the_library_does(judged, tmp_path):
    target, drafter, found = judged(("hello", "one two"), "--max-new-tokens", "8")
    tokens = [encode(target, text, chat=True, system=None) for text in ("hello", "one two")]
    texts = list(zip(tokens, answers(target, tokens, max_new_tokens=8), strict=True))
    expected = judge_texts(target, drafter, texts).agreement.mean()
    assert found["code"] == pytest.approx(expected, abs=1e-6)
    assert "answers at 0" in (tmp_path / "run" / "table.md").read_text()
    before = lines_of(tmp_path / "run" / "results.jsonl")
    judged(("hello", "one two"), "--max-new-tokens", "8")  # begun again
    assert lines_of(tmp_path / "run" / "results.jsonl") == before


def test_by_output_position_answers_go_on_and_every_span_sees_what_was_before(judged, tmp_path):
    first = load_model(write_pair(tmp_path / "first")[0], dtype="float32")
    early = answers(first, [encode(first, "hello", chat=True, system=None)], max_new_tokens=4)[0][-1]
    words = "--max-new-tokens", "20", "--span", "8", "--past-end"
    target, drafter, found = judged(("hello",), *words, eos_token_id=early)
    asked = encode(target, "hello", chat=True, system=None)
    answer = answers(target, [asked], max_new_tokens=20, past_end=True)[0]
    assert len(answer) == 20 and len(answers(target, [asked], max_new_tokens=20)[0]) <= 4
    texts = [([*asked, *answer[:start]], answer[start : start + 8]) for start in (0, 8, 16)]
    expected = judge_texts(target, drafter, texts).agreement
    assert [found[f"from {start}"] for start in (0, 8, 16)] == pytest.approx(expected, abs=1e-6)


def shard(tokens, writers):
    tokens = np.array(tokens, np.uint16)
    ends, none = np.array([0, len(tokens)]), np.zeros((len(tokens), 0))
    return Shard(
        tokens, np.array(writers, np.uint8), ends, np.zeros(1, np.uint8), np.zeros(1, np.float32),
        none.astype(np.uint16), none.astype(np.float16), ("chat",),
    )  # fmt: skip


def test_answers_count_first_and_other_tokens_break_ties(tmp_path, capsys):
    folder = ShardFolder(tmp_path / "data", {})
    folder.add("0", shard([7, 7, 7, 2, 5, 5, 9], [GIVEN] * 3 + [BY_ASSISTANT] * 4))
    folder.add("1", shard([9, 2, 4], [BY_ASSISTANT, GIVEN, GIVEN]))
    assert distill.main(["rank_tokens", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "drafter")]) == 0
    # answers: 5 and 9 twice, 2 once; anywhere: 7 three times, 2, 5, 9 twice, 4 once
    np.testing.assert_array_equal(np.load(tmp_path / "drafter" / RANKING), [5, 9, 2, 7, 4])
    assert "5 tokens cover 100.0%" in capsys.readouterr().out
    assert distill.main(["rank_tokens", "--data", str(tmp_path / "data"), "--out", str(tmp_path), "--most", "2"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / RANKING), [5, 9])


def test_texts_of_a_file(tmp_path):
    texts = tmp_path / "mine.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in ("to be or not to be", " to")))
    assert distill.main(["rank_tokens", "--texts", str(texts), "--out", str(tmp_path)]) == 0
    tokenizer = load_model("smollm2").tokenizer
    ids = [i for text in ("to be or not to be", " to") for i in [*tokenizer.encode(text), *tokenizer.eos_ids]]
    assert len(tokenizer.eos_ids) == 1, "the end of an answer can be proposed"
    counts = sorted((-ids.count(i), i) for i in set(ids))
    np.testing.assert_array_equal(np.load(tmp_path / RANKING), [i for _, i in counts])


def test_large_vocabularies_keep_their_ids():
    counts = np.zeros((70_000, 2), np.int64)
    counts[69_999] = 3
    assert distill.rank(counts).tolist() == [69_999]
