"""Strategies in words, by name or file: the call that Python would make, and one message for what is wrong."""

import dataclasses
import inspect
import os
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import stored_refusals

import specdec_jax as sd
from configs.base import CompareConfig
from experiments.lib.commands import Models as ExperimentModels
from experiments.lib.commands import Served
from specdec_jax.app import commands
from specdec_jax.app.settings import Settings
from specdec_jax.contrib.block import block
from specdec_jax.drafters.draft_models.llama_reading import language_model, reading_config
from specdec_jax.drafters.draft_models.reduced_head import with_reduced_head
from specdec_jax.drafters.reading import reading as read
from specdec_jax.loading import load_model
from specdec_jax.models import llama
from specdec_jax.stopping import adaedl, at_least, bandit, policy_bandit, static, survival, update_every
from specdec_jax.text.citations import ALWAYS, ARXIV, references
from specdec_jax.text.options import Decoding, Drafting, Models, Rules
from specdec_jax.text.pair import build_pair, check_drafter
from specdec_jax.text.strategies import TYPES, choose, find_factory, names
from specdec_jax.types import StoppingPolicy

RULE = """
from dataclasses import dataclass
from specdec_jax.stopping import static

@dataclass
class Unused:  # a dataclass looks its module up
    number: "int" = 1

def my_rule(strict: bool = False, least: int = 1):
    return static()
"""


def test_words_call_the_factory_as_python_does():
    chosen = choose("policy", "adaedl(keep_checked_token=true, threshold=0.5, entropy_factor = 0.3)")
    assert chosen == adaedl(keep_checked_token=True, threshold=0.5, entropy_factor=0.3)
    state = chosen.init(2)
    assert np.allclose(state.control.threshold, 0.5) and np.allclose(state.entropy_factor, 0.3)
    assert choose("policy", " adaedl ( True ) ") == adaedl(True) and choose("policy", "adaedl()") == adaedl()


@pytest.mark.parametrize(
    "policy",
    [
        adaedl(keep_checked_token=True, threshold=0.4),
        at_least(2, adaedl(threshold=0.4)),
        update_every(at_least(2, static(draft_length=1)), rounds=3),
        policy_bandit([adaedl(threshold=0.5), static()], "thompson"),
        bandit(lengths=(1, 3)),
        survival(verification_times=[1.0, 1.5], drafter_cost=0.1),
    ],
    ids=repr,
)
def test_a_strategy_reads_back_as_it_is_written(policy):
    again = choose("policy", repr(policy))
    assert again == policy and hash(again) == hash(policy) and repr(again) == repr(policy)


def test_a_policy_can_wrap_another():
    assert choose("policy", "at_least(2, adaedl)") == at_least(2, adaedl())
    wrapped = at_least(2, adaedl(threshold=0.4))
    assert np.allclose(wrapped.init(1).control.threshold, 0.4)
    assert np.allclose(wrapped.init(1, threshold=0.3).control.threshold, 0.3)


def test_a_users_own_file(tmp_path):
    path = tmp_path / "my_rule.py"
    path.write_text(RULE)
    chosen = choose("policy", f"{path}(draft_length=3, strict=True, least=2)")
    assert isinstance(chosen, StoppingPolicy) and chosen.given == {"draft_length": 3}
    assert chosen.options == {"strict": True, "least": 2} and np.all(chosen.init(1).draft_length == 3)
    inside = choose("policy", f"at_least(minimum=2, policy={str(path)!r})")
    assert inside == at_least(2, choose("policy", str(path)))
    path.write_text(RULE.replace("return static()", "return static(draft_length=1)"))
    os.utime(path, ns=(1, 1))
    assert np.all(choose("policy", str(path)).init(1).draft_length == 1), "a changed file is read again"


def test_a_users_file_can_import_files_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "my_rule.py").write_text("from a_helper_of_my_rule import LENGTH\n" + RULE)
    (tmp_path / "a_helper_of_my_rule.py").write_text("LENGTH = 2\n")
    assert isinstance(choose("policy", str(tmp_path / "my_rule.py")), StoppingPolicy)
    (tmp_path / "json.py").write_text("raise ImportError('nothing of the name of an installed module is taken')")
    (tmp_path / "other.py").write_text(RULE.replace("my_rule", "other").replace("static\n", "static\nimport json\n", 1))
    assert isinstance(choose("policy", str(tmp_path / "other.py")), StoppingPolicy)


test_what_is_wrong_is_named = stored_refusals("strategies", lambda words: choose("policy", words))


test_a_users_file_that_fails_is_one_message = stored_refusals(
    "strategy_files", lambda path: choose("policy", path), "my_rule.py"
)


SIZED = """
from specdec_jax.drafters import prompt_lookup
from specdec_jax.types import Drafter

SIZES = []

def sized(vocab_size, max_draft_length, inner: Drafter = None):
    SIZES.append(vocab_size)
    return prompt_lookup(max_draft_length=max_draft_length, vocab_size=vocab_size)
"""


def test_a_users_drafter_always_knows_the_targets_vocabulary(tiny_folders, tmp_path):
    """By itself, inside another's call, among several; checked before weights are read it is not called."""
    file = tmp_path / "sized.py"
    file.write_text(SIZED)
    words = f"{file}(inner='{file}')"
    check_drafter((words, "ngram"))
    inner = choose("drafter", f"{file}(inner=ngram(order=3))", vocab_size=5, max_draft_length=2).options["inner"]
    assert inner.options["vocab_size"] == 5 and inner.options["max_draft_length"] == 2
    sizes = find_factory("drafter", str(file)).__wrapped__.__globals__["SIZES"]
    assert set(sizes) == {5}
    sizes.clear()
    target = load_model(tiny_folders[0], dtype="float32")
    pair = build_pair(target, words, costs="estimated")
    build_pair(target, (words, "ngram"), costs="estimated")
    size = target.model.spec.vocab_size
    assert pair.decoder.parts.drafter.options["inner"].options["vocab_size"] == size and set(sizes) == {size}


BUILT_IN = [(kind, name) for kind in TYPES for name in names(kind)]


def ids(text: str) -> set[str]:
    return set(re.findall(r"eprint = \{(.+?)\}", text)) - {*ALWAYS.split()}


def test_entries_are_whole_and_each_is_somebodys_source():
    modules = [sys.modules[find_factory(kind, name).__module__] for kind, name in BUILT_IN]
    assert {source for module in modules for source in ARXIV.findall(str(module.__doc__))} <= references().keys()
    elsewhere = "specdec_jax.drafters.draft_models", block.__module__
    modules += [module for name, module in sys.modules.items() if name.startswith(elsewhere)]
    named = ALWAYS + "\n".join(str(module.__doc__) for module in modules)
    assert [source for source in references() if source not in named] == []
    for entry in references().values():
        assert entry.count("{") == entry.count("}")
        assert all(f"{word} = {{" in entry for word in ("title", "author", "year"))


def test_what_a_run_used_is_cited_once_and_nothing_else():
    inner = sd.stopping.at_least(minimum=2, policy=sd.stopping.svip())
    found = sd.citations(inner, sd.verification.block(), sd.stopping.svip())
    assert ids(found) == {"2411.18462", "2403.10444"} and found.count("@") == 5
    assert all(source in found for source in ALWAYS.split()) and sd.__version__ in found
    assert "Saxena" in sd.citations(sd.drafters.prompt_lookup())
    config = reading_config(llama.example_config(), (0, 1), 24)
    reading = with_reduced_head(language_model(config, jnp.float32))
    drafter = sd.drafters.multi_drafter([sd.drafters.ngram(), read(reading)])
    assert ids(sd.citations(drafter)) == {"2502.14856", "2401.15077", "2503.01840"}
    assert ids(sd.citations(sd.drafters.model(llama.language_model(llama.example_config(), jnp.float32)))) == set()


def test_a_users_file_is_cited_by_its_ids(tmp_path):
    path = tmp_path / "mine.py"
    rule = "from specdec_jax.stopping import static\n\n\ndef mine():\n    return static(draft_length=2)\n"
    path.write_text(f'"""Mine, after arXiv 2999.01234 and AdaEDL (2410.18351)."""\n{rule}', encoding="utf-8")
    assert ids(sd.citations(choose("policy", str(path)))) == {"2999.01234", "2410.18351"}
    with pytest.raises(ValueError, match="citations are of pairs and strategies, got 'adaedl'"):
        sd.citations("adaedl")


SOURCES = (Models, Rules, Drafting, Decoding)
DECLARED = {field.name: field for source in SOURCES for field in dataclasses.fields(source)}


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (CompareConfig, {"drafter"}),  # another default
        (ExperimentModels, {"drafter"}),
        (Served, {"dtype"}),  # no auto
        (Settings, set()),
        *((kind, set()) for kind in (commands.Generate, commands.GenerateFile, commands.Chat, commands.Doctor)),
        (commands.Answers, {"max_new_tokens", "stop"}),  # fewer tokens, and no stop strings
    ],
)
def test_no_class_declares_an_option_of_its_own_again(kind, others):
    names = {field.name for field in dataclasses.fields(Models)}
    names |= set() if kind is CompareConfig else {*DECLARED}  # its temperatures and lengths are of experiments
    assert set(kind.__annotations__) & names == others


def test_build_pair_has_the_defaults_of_the_options():
    parameters = inspect.signature(build_pair).parameters
    shared = parameters.keys() & DECLARED.keys() - {"policy", "verifier"}
    assert shared == {"target", "drafter", "max_draft_length", "dtype", "costs"}
    assert all(parameters[name].default == DECLARED[name].default for name in shared)
    for name in ("policy", "verifier"):
        assert parameters[name].default == choose(name, DECLARED[name].default)
