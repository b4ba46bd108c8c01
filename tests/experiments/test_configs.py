"""Configs: the committed ones load, overrides apply, every mistake is one message with the nearest name."""

import hashlib
import sys
from pathlib import Path

import pytest
from refusals import stored_refusals

from configs.base import CompareConfig, Method, config_hash, load_config, override
from experiments.lib.prompts import load_prompts, read_prompts
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.text.strategies import choose

ROOT = Path(__file__).resolve().parents[2]
DEMO_PROMPTS = ROOT / "configs" / "prompts" / "demo.jsonl"
DEMO = str(ROOT / "configs" / "demo.py")
PLAIN = Method("plain", policy=None)


def test_the_demo_prompts_are_frozen():
    """A change would make old and new results incomparable under one name; make another file instead."""
    digest = "47e5784374cd06e26325f0559665779a0abc2ce00203c77091f75074744c929d"
    assert hashlib.sha256(DEMO_PROMPTS.read_bytes()).hexdigest() == digest
    prompts = read_prompts(DEMO_PROMPTS)
    categories = [prompt.category for prompt in prompts]
    assert len(prompts) == 12 and all(len(prompt.turns) == 1 for prompt in prompts)
    assert [categories.count(name) for name in dict.fromkeys(categories)] == [3, 3, 3, 3]


def test_what_lies_beside_a_config_can_be_imported_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "lies_beside.py").write_text("from specdec_jax.stopping import static\n")
    (tmp_path / "mine.py").write_text(
        "from lies_beside import static\n"
        "from configs.base import CompareConfig, Method\n"
        "methods = (Method('plain', None), Method('mine', static(draft_length=2)))\n"
        "config = CompareConfig(name='mine', prompts='configs/prompts/demo.jsonl', methods=methods)\n"
    )
    assert load_config(tmp_path / "mine.py").methods[1].policy == static(draft_length=2)


CONFIGS = sorted(path for path in (ROOT / "configs").glob("[a-z]*.py") if not path.name.startswith("base"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_committed_config_loads(path):
    load_config(path)


def test_configs_for_a_gpu_pass_once_over_their_text_with_the_loss_of_acceptance():
    more = (ROOT / "configs" / "distill_smollm2_gpu_end.py").read_text().split("coder_reading_gpu.py: ")[1]
    more = more.partition("\nExpected")[0].replace("\\\\", " ").split()
    for name, words in (("distill_coder_reading_gpu", []), ("distill_smollm2_gpu_end", more)):
        config = load_config(ROOT / "configs" / f"{name}.py", words)
        assert 0.7 < config.schedule.steps * config.packing.tokens / config.tokens <= 1 and config.tokens >= 50_000_000
        assert config.labels == 0 and config.loss.__qualname__ == "lk_hybrid(3)"
    assert (config.start_from, config.name) == ("smollm2-drafter-reading", "distill-smollm2-gpu-more")


def test_the_demo_and_its_overrides():
    config = load_config(DEMO)
    categories = [prompt.category for prompt in load_prompts(config.prompts)]
    assert len(categories) == 6 and len(set(categories)) == 4
    assert len(config.chosen_methods()) == 5 and (config.target, config.drafter) == ("smollm2", "smollm2-drafter")
    whole = load_config(DEMO, ["--only", "--prompts", "configs/prompts/demo.jsonl"])
    assert len(whole.chosen_methods()) == 9 and len(load_prompts(whole.prompts)) == 12
    words = "--max-new-tokens 32 --temperatures 0 0.5 --only adaedl --no-chat --limit 2 --out x"
    config = load_config(DEMO, words.split())
    assert (config.max_new_tokens, config.temperatures, config.chat, config.limit) == (32, (0.0, 0.5), False, 2)
    assert [method.name for method in config.chosen_methods()] == ["plain", "adaedl"] and config.out == "x"
    assert len(config.methods) == 9 and load_config(DEMO).max_new_tokens == 64


def test_a_refused_value_is_named_and_an_unknown_option_names_the_nearest(capsys):
    for words in ("--max-new-tokens 0", "--max-new-tokens x", "--only adadl", "--temperatures -1"):
        with pytest.raises(SystemExit, match="2"):
            override(load_config(DEMO), words.split())
        assert words.split()[1] in capsys.readouterr().err
    for unknown in ("--max-new-token 32", "--max_new_token=32", "--max-new-tokns 32"):
        with pytest.raises(ValueError, match="did you mean '--max-new-tokens'"):
            load_config(DEMO, unknown.split())
    with pytest.raises(ValueError, match="--methods"):
        load_config(DEMO, ["--methods", "plain"])


def load_written(text, tmp_path):
    """A whole file that ends a line, or a second method."""
    path = tmp_path / "mine.py"
    imports = "from configs.base import CompareConfig, Method\nfrom specdec_jax.stopping import adaedl, static\n"
    call = f'config = CompareConfig(name="x", prompts="p", methods=(\n  Method("plain", policy=None), {text}))\n'
    path.write_text(text if text.endswith("\n") else imports + call)
    load_config(path)


test_a_mistake_in_a_config_is_one_message = stored_refusals("configs", load_written)


def test_no_such_config_and_a_baseline_that_is_not_the_first():
    with pytest.raises(FileNotFoundError, match="configs/dem.py.*did you mean 'demo.py'"):
        load_config(ROOT / "configs" / "dem.py")
    with pytest.raises(ValueError, match="baseline"):
        CompareConfig(name="x", prompts="p", methods=(Method("a", adaedl()), PLAIN))


def test_the_hash_changes_with_what_can_change_a_result(tmp_path):
    prompts, moved = tmp_path / "p.jsonl", tmp_path / "q.jsonl"
    for path in (prompts, moved):
        path.write_text('{"text": "a"}\n')

    def digest(threshold=0.5, keep=False, **fields):
        method = Method("a", adaedl(keep_checked_token=keep, threshold=threshold))
        fields = {"name": "x", "prompts": str(prompts), "methods": (PLAIN, method), **fields}
        return config_hash(CompareConfig(**fields))

    same = digest()
    assert same == digest(name="other") == digest(out="folder") == digest(limit=1) == digest(prompts=str(moved))
    different = [digest(0.6), digest(keep=True)]
    different += [digest(**fields) for fields in ({"seed": 1}, {"temperatures": (0.0,)}, {"dtype": "float32"})]
    different += [
        digest(prompts=source) for source in (f"{prompts}:2", f"{prompts}:3", "hub:gsm8k", "hub:cnn_dailymail")
    ]
    assert digest(prompts=f"{moved}:2") == digest(prompts=f"{prompts}:2")
    prompts.write_text('{"text": "b"}\n')
    assert len({same, *different, digest()}) == 11


def test_strategies_inside_strategies_count_by_how_they_were_built():
    def digest(policy):
        return config_hash(CompareConfig(name="x", prompts="p", methods=(PLAIN, Method("a", policy))))

    keeps, usual = adaedl(keep_checked_token=True), adaedl()
    inner = usual, keeps, adaedl(raw_entropy=True), at_least(2, usual), at_least(2, keeps), adaedl(threshold=0.5)
    digests = [digest(at_least(policy=policy)) for policy in (*inner, static())]
    assert len(set(digests)) == len(digests) == 7
    assert digest(at_least(policy=adaedl(keep_checked_token=False))) == digests[0]
    with pytest.raises(ValueError, match="made by no factory under @strategy"):
        digest(static().replace(begin=adaedl().begin))


def test_rules_of_files_count_by_what_is_in_them(tmp_path):
    file, digests = tmp_path / "mine.py", set()
    for name in ("static", "svip"):
        file.write_text(f"from specdec_jax import stopping\n\ndef mine():\n    return stopping.{name}()\n")
        methods = (Method("a", choose("policy", str(file))),)
        digests |= {config_hash({"rules": [f"at_least(policy={file})"]}), config_hash({"methods": methods})}
    assert len(digests) == 4


def test_traces_and_costs_count_by_what_is_in_them(tmp_path):
    folder, costs = tmp_path / "traces", tmp_path / "costs.json"
    folder.mkdir()
    trace = folder / "trace-0.npz"

    def digest(paths=(str(folder),)):
        return config_hash({"traces": paths, "costs": str(costs), "rules": ("adaedl",)})

    trace.write_bytes(b"one")
    costs.write_text("{}")
    first = digest()
    moved = folder.rename(tmp_path / "elsewhere")
    assert digest((str(moved),)) == first
    (moved / trace.name).write_bytes(b"recorded anew")
    anew = digest((str(moved),))
    costs.write_text('{"c": 1}')
    assert len({first, anew, digest((str(moved),))}) == 3
    assert digest([str(moved / trace.name)]) == digest((str(moved),))
