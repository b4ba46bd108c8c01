"""Configs: the committed ones load, overrides apply, every mistake is one message with the nearest name."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.base import CompareConfig, Method, config_hash, describe, load_config, override, rebuild
from experiments.lib.prompts import load_prompts, read_prompts
from specdec_jax.stopping import adaedl, at_least, policy_bandit, static, survival

ROOT = Path(__file__).resolve().parents[2]
DEMO_PROMPTS = ROOT / "configs" / "prompts" / "demo.jsonl"
PLAIN = Method("plain", policy=None)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


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
    (tmp_path / "lies_beside.py").write_text("from helps_it import LENGTH\nfrom specdec_jax.stopping import static\n")
    (tmp_path / "helps_it.py").write_text("LENGTH = 2\n")
    (tmp_path / "mine.py").write_text(
        "from lies_beside import LENGTH, static\n"
        "from configs.base import CompareConfig, Method\n"
        "methods = (Method('plain', None), Method('mine', static(draft_length=LENGTH)))\n"
        "config = CompareConfig(name='mine', prompts='configs/prompts/demo.jsonl', methods=methods)\n"
    )
    assert load_config(tmp_path / "mine.py").methods[1].policy == static(draft_length=2)


CONFIGS = sorted(path for path in (ROOT / "configs").glob("[a-z]*.py") if not path.name.startswith("base"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_committed_config_loads_and_opens_with_its_question(path):
    load_config(path)
    text = path.read_text(encoding="utf-8")
    for word in ("?", "Command:", "Hardware:", "Time:", "Expected:"):
        assert word in text.split('"""')[1], f"{path.name} does not say {word}"


def test_the_demo_is_what_it_says():
    config = load_config("configs/demo.py")
    chosen = ["plain", "adaedl", "survival", "survival-8192", "survival-reading"]
    assert [method.name for method in config.chosen_methods()] == chosen
    categories = [prompt.category for prompt in load_prompts(config.prompts)]
    assert len(categories) == 6 and len(set(categories)) == 4
    assert (config.temperatures, config.max_new_tokens, config.repeats) == ((0.0, 0.8), 64, 1)
    assert (config.target, config.drafter) == ("smollm2", "smollm2-drafter")


def test_the_rest_of_the_demo_is_one_option_away():
    config = load_config("configs/demo.py", ["--only", "--prompts", "configs/prompts/demo.jsonl"])
    assert [method.name for method in config.chosen_methods()] == [
        "plain",
        "static-3",
        "static-7",
        "adaedl",
        "adaedl-keep",
        "survival",
        "survival-8192",
        "survival-reading",
    ]
    assert len(load_prompts(config.prompts)) == 12


def test_overrides():
    arguments = [
        "--max-new-tokens",
        "32",
        "--temperatures",
        "0",
        "0.5",
        "--only",
        "adaedl",
        "--no-chat",
        "--limit",
        "2",
    ]
    arguments += ["--out", "x"]
    config = load_config("configs/demo.py", arguments)
    assert (config.max_new_tokens, config.temperatures, config.chat, config.limit) == (32, (0.0, 0.5), False, 2)
    assert [method.name for method in config.chosen_methods()] == ["plain", "adaedl"] and config.out == "x"
    assert len(config.methods) == 8 and load_config("configs/demo.py").max_new_tokens == 64


@pytest.mark.parametrize("argument", ["--max-new-token", "--max_new_token=32", "--max-new-tokns"])
def test_an_unknown_option_names_the_nearest(argument):
    with pytest.raises(ValueError, match="did you mean '--max-new-tokens'"):
        load_config("configs/demo.py", [argument, "32"])


def test_methods_cannot_be_set_on_the_command_line():
    with pytest.raises(ValueError, match="--methods"):
        load_config("configs/demo.py", ["--methods", "plain"])


@pytest.mark.parametrize(
    "arguments", [["--max-new-tokens", "0"], ["--max-new-tokens", "x"], ["--only", "adadl"], ["--temperatures", "-1"]]
)
def test_a_refused_value_ends_the_program_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        override(load_config("configs/demo.py"), arguments)
    assert end.value.code == 2 and capsys.readouterr().err.strip()


BAD_FILES = {
    'Method("a", adaedl(treshold=0.3))': r":4: adaedl has no option 'treshold'; did you mean 'threshold'",
    'Method("a", adaedl(), verifer=3)': r":4: Method has no 'verifer'; did you mean 'verifier'",
    'Method("a", adaedl(threshold=3))': r":4: threshold must lie in \[0, 0.99\], got 3",
    'Method("a", adaedl)': r":4: method 'a' needs a StoppingPolicy, got .*; call it: adaedl\(\)",
    'Method("a", "adaedl")': r":4: method 'a' needs a StoppingPolicy, got 'adaedl'",
    'Method("a", adaedl(), verifier=None)': r":4: method 'a' needs a Verifier, got None",
    'Method("plain", adaedl())': r"method names must differ, got plain, plain",
    "3": r":3: methods must be a tuple of Method\(\.\.\.\), got .*3\)",
    'Method("a", static())), seed=-1, temperatures=(0.0,': "seed must be at least 0, got -1",
    'Method("a", static(), max_draft_length=0)': r"max_draft_length must be 1 or more, got 0",
    'Method("a", adaedl()), ), max_new_token=(3': r"no 'max_new_token'; did you mean 'max_new_tokens'",
    'Method("a", adaedl()), ), dtype=("bfloat"': r"unknown dtype 'bfloat'; did you mean 'bfloat16'",
    'Method("a", adaedl()), ), temperatures=(-0.5,': r"temperatures .*-0.5",
    'Method("a", adaedl()), ), top_p=(0.0': r"top_p must lie in \(0, 1\], got 0.0",
    'Method("a", adaedl(': r"SyntaxError",
    "undefined": r":4: NameError",
}


@pytest.mark.parametrize("method", BAD_FILES)
def test_a_mistake_in_a_config_is_one_message(tmp_path, method):
    path = tmp_path / "mine.py"
    text = "from configs.base import CompareConfig, Method\nfrom specdec_jax.stopping import adaedl, static\n"
    call = f'config = CompareConfig(name="x", prompts="p", methods=(\n  Method("plain", policy=None), {method}))\n'
    path.write_text(text + call)
    with pytest.raises(ValueError, match=BAD_FILES[method]):
        load_config(path)


def test_a_misspelt_policy_names_the_nearest(tmp_path):
    (tmp_path / "mine.py").write_text("from specdec_jax.stopping import adadl\n")
    with pytest.raises(ValueError, match="specdec_jax.stopping has no 'adadl'; did you mean 'adaedl'"):
        load_config(tmp_path / "mine.py")


def test_a_file_without_a_config_and_a_missing_file(tmp_path):
    (tmp_path / "mine.py").write_text("confg = 3\n")
    with pytest.raises(ValueError, match="must set `config`"):
        load_config(tmp_path / "mine.py")
    with pytest.raises(FileNotFoundError, match="configs/dem.py.*did you mean 'demo.py'"):
        load_config("configs/dem.py")


def test_the_baseline_comes_first():
    with pytest.raises(ValueError, match="baseline"):
        CompareConfig(name="x", prompts="p", methods=(Method("a", adaedl()), PLAIN))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("prompt_lookup(longst=4)", "did you mean 'longest'"),
        ("ngram(order=1)", "got 1"),
        ("prompt_lokup(longest=4)", "drafter 'prompt_lokup' takes no options; did you mean 'prompt_lookup'"),
        (("smollm2-drafter", "ngram(longest=4)"), "drafter ngram has no option 'longest'"),
    ],
)
def test_a_methods_drafter_is_checked_before_anything_is_loaded(drafter, message):
    with pytest.raises(ValueError, match=message):
        Method("a", static(), drafter=drafter)


def test_a_drafter_needs_a_policy():
    with pytest.raises(ValueError, match="no policy to say when"):
        Method("plain", None, drafter="ngram")


def test_the_hash_changes_with_what_can_change_a_result(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"text": "a"}\n')

    def digest(threshold=0.5, keep=False, **fields):
        method = Method("a", adaedl(keep_checked_token=keep, threshold=threshold))
        return config_hash(
            CompareConfig(**{"name": "x", "prompts": str(prompts), "methods": (PLAIN, method), **fields})
        )

    same = digest()
    assert same == digest(name="other") == digest(out="folder") == digest(limit=1)
    different = [
        digest(0.6),
        digest(keep=True),
        digest(seed=1),
        digest(temperatures=(0.0,)),
        digest(dtype="float32"),
        digest(prompts=f"{prompts}:2"),
        digest(prompts=f"{prompts}:3"),
        digest(prompts="hub:gsm8k"),
        digest(prompts="hub:openai_humaneval"),
    ]
    moved = tmp_path / "folder" / "q.jsonl"
    moved.parent.mkdir()
    moved.write_text(prompts.read_text())
    assert digest(prompts=str(moved)) == same and digest(prompts=f"{moved}:2") == digest(prompts=f"{prompts}:2")
    prompts.write_text('{"text": "b"}\n')
    assert len({same, *different, digest()}) == 11


def test_strategies_inside_strategies_count_by_how_they_were_built():
    def digest(policy):
        return config_hash(CompareConfig(name="x", prompts="p", methods=(PLAIN, Method("a", policy))))

    digests = [
        digest(at_least(policy=adaedl())),
        digest(at_least(policy=adaedl(keep_checked_token=True))),
        digest(at_least(policy=adaedl(raw_entropy=True))),
        digest(at_least(policy=at_least(2, adaedl()))),
        digest(at_least(policy=at_least(2, adaedl(keep_checked_token=True)))),
        digest(at_least(policy=adaedl(threshold=0.5))),
        digest(at_least(policy=static())),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(at_least(policy=adaedl(keep_checked_token=False))) == digests[0]
    with pytest.raises(ValueError, match="made by no factory under @strategy"):
        digest(static().replace(begin=adaedl().begin))


@pytest.mark.parametrize(
    "policy",
    [
        adaedl(threshold=0.5, keep_checked_token=True),
        at_least(2, adaedl(threshold=0.5)),
        policy_bandit([adaedl(threshold=0.5), static(draft_length=2)], exploration=0.3),
        survival(greedy=(0.5,) * 3, verification_times=np.array([1.0, 1.5])),
    ],
)
def test_a_strategy_is_built_again_from_its_description(policy):
    again = rebuild(json.loads(json.dumps(describe(policy))))
    assert describe(again) == describe(policy) and again.bare == policy.bare


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


def test_a_description_is_json_and_names_factories():
    inner = Method("a", at_least(2, adaedl()))
    text = json.dumps(describe(CompareConfig(name="x", prompts="p", methods=(PLAIN, inner))))
    assert "specdec_jax.stopping.at_least:at_least" in text and "specdec_jax.stopping.adaedl:adaedl" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", r":2: not JSON"),
        ("[1, 2]", r":2: expected an object, got list"),
        ('{"promt": "x"}', r":2: none of the keys turns, prompt, text in it, only 'promt'"),
        ('{"turns": []}', r":2: 'turns' must be text that is not empty, got \[\]"),
        ('{"turns": ["a", ""]}', r":2: 'turns'"),
        ('{"prompt": 3}', r":2: 'prompt' .* got 3"),
        ('{"turns": "hi"}', r":2: 'turns' must be a list of texts, such as ..hi.., got 'hi'"),
        ('{"id": "1", "text": "x"}', r":2: the id '1' occurs a second time"),
    ],
)
def test_a_bad_prompt_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_prompt_shapes(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        '{"question_id": 81, "category": "writing", "turns": ["a", "b"]}',
        "",
        '{"prompt": "c\u2028d"}',
        '{"text": "e"}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    prompts = read_prompts(path)
    assert [(p.id, p.category, p.turns) for p in prompts] == [
        ("81", "writing", ("a", "b")),
        ("3", "none", ("c\u2028d",)),
        ("4", "none", ("e",)),
    ]
    assert read_prompts(path, limit=1) == prompts[:1]


def test_prompt_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b'{"text": "\xe4"}\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "latin")
    with pytest.raises(ValueError, match="got 0"):
        read_prompts(DEMO_PROMPTS, limit=0)
