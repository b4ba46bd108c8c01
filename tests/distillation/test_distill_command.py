"""`python -m experiments.distill` from target to drafter; killed at any moment, it goes on to the same weights."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_weights

from configs import distill_smollm2_reading as reading_config_file
from configs.base import load_config
from configs.base_distillation import VariantsConfig
from experiments import distill
from experiments.lib import distill_train
from experiments.lib import distill_variants as compare_distillation
from specdec_jax.loading import load_model
from specdec_jax.locks import locked
from specdec_jax.models import gpt2
from specdec_jax.stopping import static
from specdec_jax.text.generation import generate
from specdec_jax.text.sampling_params import SamplingParams

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
def place(tmp_path_factory):
    """A tiny target, prompts and the config."""
    folder = tmp_path_factory.mktemp("distill")
    target = folder / "target"
    tiny_weights.write_folder(target, tiny_weights.weights())
    prompts = folder / "prompts.jsonl"
    lines = [{"id": i, "category": c, "turns": [t]} for i, (c, t) in enumerate([("qa", "hello"), ("writing", "he he")])]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    kinds = [{"kind": "a", "texts": ["hello", "he {n}"]}, {"kind": "b", "texts": ["he hello"], "long": True}]
    openings = folder / "openings.json"
    openings.write_text(json.dumps({"openings": kinds}))
    config = folder / "config.py"
    config.write_text(CONFIG.format(target=str(target), prompts=str(prompts), openings=str(openings)))
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing stopped."""
    out = place / "whole"
    assert distill.main([str(place / "config.py"), "--out", str(out)]) == 0
    return out


def test_without_labels_the_target_runs_in_every_step(place, tmp_path):
    words = [str(place / "config.py"), "--out", str(tmp_path / "online"), "--labels", "0", "--packing.candidates", "0"]
    assert distill.main([*words, "--shape.reads", "1", "2", "--judge-temperatures", "0"]) == 0
    manifest = json.loads((tmp_path / "online" / "data" / "manifest.json").read_text())
    assert all(entry["labels"] == 0 and "hidden" not in entry for entry in manifest["shards"])
    assert "whole distributions" in (tmp_path / "online" / "drafter" / "README.md").read_text()


def test_data_with_other_labels_names_the_stage_that_mends_it(place, whole, capsys):
    words = [str(place / "config.py"), "--out", str(whole), "--labels", "5", "--stage", "train"]
    assert distill.main(words) == 2
    assert "has 4 labels per position, labels is 5: run --stage label" in capsys.readouterr().err


def weights(out: Path) -> bytes:
    return (out / "drafter" / "model.safetensors").read_bytes()


def test_a_run_leaves_data_curve_judgement_and_a_drafter_that_loads(whole, capsys):
    manifest = json.loads((whole / "data" / "manifest.json").read_text())
    assert manifest["tokens"] >= 1200 and {entry["rows"] for entry in manifest["shards"]} == {"short", "long"}
    lines = [json.loads(line) for line in (whole / "train" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 12 and "validation_acceptance" in lines[-1]
    assert (whole / "train" / "curve.png").stat().st_size > 5000
    judged = json.loads((whole / "judge" / "judgement.json").read_text())
    assert judged["step"] == 12 and set(judged["figures"]) == {"prompts, answers at 0", "prompts, answers at 0.7"}
    assert set(judged["figures"]["prompts, answers at 0"]) == {"qa", "chat", "macro"}
    hf, orbax = (load_model(whole / name, dtype="float32") for name in ("drafter", "drafter-orbax"))
    assert hf.config == orbax.config and hf.config.num_hidden_layers == 1
    card = (whole / "drafter" / "README.md").read_text()
    assert "12 steps" in card and "greedy agreement" in card


@pytest.mark.seldom
def test_a_drafter_of_another_family_comes_from_the_same_data(place, whole, tmp_path):
    """Stopped after a step, gone on to the end, exported, loaded: it drafts what its target would write."""
    family, kind, out = "gpt2", gpt2.GPT2Config, tmp_path / "gpt2"
    shutil.copytree(whole / "data", out / "data")
    shape = ["--shape.family", family, "--shape.kv-heads", "2"]
    command = [str(place / "config.py"), "--out", str(out), *shape, "--judge-temperatures", "0"]
    assert distill.main([*command, "--stage", "train", "--intervals.minutes", "1e-9"]) == 0
    assert distill.main(command) == 0
    lines = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6, 8, 9, 10, 12]
    hf, orbax = (load_model(out / name, dtype="float32") for name in ("drafter", "drafter-orbax"))
    target = load_model(place / "target", dtype="float32")
    assert type(hf.config) is type(orbax.config) is kind and hf.config == orbax.config
    assert hf.config.context == target.config.context and hf.tokenizer.eos_ids == target.tokenizer.eos_ids
    sampling, options = SamplingParams(24), {"target": target, "chat": False, "costs": "estimated"}
    plain = generate("hello he", sampling, drafter=None, **options)
    drafted = generate("hello he", sampling, drafter=hf, policy=static(draft_length=3), **options)
    assert drafted.tokens == plain.tokens and drafted.statistics["num_draft_tokens"] > 0
    config = load_config(place / "config.py")
    shape = dataclasses.replace(config.shape, reads=(1,))
    with pytest.raises(ValueError, match=f"reads is for .* family 'llama', start_from .* is a {kind.__name__}"):
        distill_train.initial_state(
            dataclasses.replace(config, shape=shape, start_from=str(out / "drafter")), target, None
        )


def test_smoke_makes_the_config_small_and_other_options_overrule_it(place, monkeypatch):
    asked = []
    monkeypatch.setattr(distill, "distill", lambda config, stages, console, share: asked.append((config, stages)))
    assert distill.main([str(place / "config.py"), "--smoke", "--schedule.steps", "3", "--stage", "write"]) == 0
    ((made, stages),) = asked
    assert (made.name, made.schedule.steps, made.cycle, stages) == ("tiny-smoke", 3, ("short",), ["write"])
    assert made.shape == distill._config(str(place / "config.py"), []).shape and made.judge[0].endswith(
        "prompts.jsonl:6"
    )


def test_every_committed_config_can_be_made_small():
    for path in sorted((ROOT / "configs").glob("distill_smollm2*.py")):
        made = distill._config(str(path), ["--smoke"])
        assert made.tokens < 5000 and made.schedule.steps == 10 and made.name.endswith("-smoke")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule.steps", "20"], "set schedule.warmup to 2"),
        (["--packing.tokens", "500"], "set packing.tokens to 896"),
        (["--packing.tokens", "896"], "set chunk to 224"),
        (["--packing.slots", "64", "128", "--packing.tokens", "512"], "set short.slots and long.slots to at most 128"),
        (["--packing.candidates", "512"], "set packing.sampled to 64"),
        (["--shape.width", "32"], "set shape.width to 64, or shape.init to"),
        (["--shape.layers", "1"], "set shape.layers to 2, or shape.init to"),
        (["--shape.head-dim", "16"], "set shape.head-dim to that"),
    ],
)
def test_numbers_that_do_not_fit_say_what_to_set(arguments, words, capsys):
    assert distill.main([str(ROOT / "configs" / "distill_smollm2.py"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1, said


def test_a_finished_run_does_nothing_again(place, whole, capsys):
    before = weights(whole)
    assert distill.main([str(place / "config.py"), "--out", str(whole), "--stage", "write", "--stage", "train"]) == 0
    assert "are there" in capsys.readouterr().out and weights(whole) == before


def test_other_settings_and_a_folder_in_use_are_refused(place, whole, capsys):
    command = [str(place / "config.py"), "--out", str(whole)]
    for arguments, said in ((["--seed", "6"], "seed"), (["--stage", "train", "--schedule.rate", "0.1"], "schedule")):
        assert distill.main([*command, *arguments]) == 2 and said in capsys.readouterr().err
    with locked(whole):
        assert distill.main(command) == 2
    assert f"in use by another process (pid {os.getpid()})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a config first"),
        (["{config}", "--stage", "judgement"], "unknown stage 'judgement'"),
        (["{config}", "--toknes", "9"], "--toknes"),
        (["{config}", "--held-out", "nowhere.jsonl"], "nowhere.jsonl"),
        (["{config}", "--stage", "train"], "holds no shards"),
        (["{config}", "--stage", "judge"], "no checkpoint"),
    ],
)
def test_bad_input_is_one_line(place, tmp_path, capsys, arguments, said):
    given = [argument.format(config=place / "config.py") for argument in arguments]
    out = ["--out", str(tmp_path / "out")] if given else []
    assert distill.main([*given, *out]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error:") and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("arguments", "said"), [(["--tokens", "0"], "tokens"), (["--chunk", "7"], "chunk (7)")])
def test_values_out_of_range_are_named(place, tmp_path, capsys, arguments, said):
    assert distill.main([str(place / "config.py"), "--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


VARIANTS = """
import dataclasses
from configs.base_distillation import VariantsConfig
from specdec_jax.distillation import losses
from specdec_jax.distillation.unrolled import Unroll
shape, whole = dataclasses.replace(config.shape, reads=(1, 2)), dataclasses.replace(config.packing, candidates=0)
reading = {"labels": 0, "packing": whole, "shape": shape}
variants = {"two": reading | {"unroll": Unroll(2)}, "three": reading}
variants |= {"plain": {}, "hybrid": {"loss": losses.lk_hybrid()}}
config = VariantsConfig(base=config, seconds=0.2, texts=4, variants=variants)
"""


@pytest.mark.seldom
def test_variants_are_trained_for_the_same_time_and_once(place, whole, capsys, monkeypatch):
    path = place / "variants.py"
    path.write_text((place / "config.py").read_text() + VARIANTS)
    command = [str(path), "--data", str(whole / "data"), "--out", str(place / "variants")]
    assert compare_distillation.main([*command, "--only", "hybrid"]) == 0
    assert compare_distillation.main(command) == 0
    rows = [json.loads(line) for line in (place / "variants" / "results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["hybrid", "two", "three", "plain"]
    assert all(row["steps"] >= 10 for row in rows)
    assert [len(row.get("by_draft", ())) for row in rows] == [0, 3, 3, 0] and rows[1]["by_draft"][2]["acceptance"] > 0
    assert all(0 <= row["agreement"][0] <= 1 and 0 < row["acceptance_0.7"][0] <= 1 for row in rows)
    assert "| hybrid | 0.0 M |" in (place / "variants" / "table.md").read_text()
    assert compare_distillation.main([*command, "--only", "revers"]) == 2
    assert "'revers'" in capsys.readouterr().err


def test_a_variant_of_a_field_that_is_unknown_or_that_judging_needs_is_named():
    for key, message in (("shpe", "'shpe'.*did you mean 'shape'"), ("validation", "'x' changes 'validation'")):
        with pytest.raises(ValueError, match=message):
            VariantsConfig(base=None, variants={"x": {key: 1}})


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
    assert weights(out) == weights(whole)
    told = [json.loads((run / "data" / "manifest.json").read_text())["shards"] for run in (out, whole)]
    assert told[0] == told[1]
    assert not list(out.rglob("*.tmp*"))[2:]  # what a kill may leave: one file a stage at most


def test_what_a_drafter_reads_is_not_changed_by_training_on():
    base = reading_config_file.config
    shape = dataclasses.replace(base.shape, reads=(16, 22))
    config = dataclasses.replace(base, start_from="smollm2-drafter-reading", shape=shape)
    with pytest.raises(
        ValueError, match=r"'smollm2-drafter-reading' reads layers \(16, 22, 26\), shape.reads is \(16, 22\)"
    ):
        distill_train.initial_state(config, None, None)
