"""Every option is declared once, in `text/options.py`; whatever takes it has its type and default from there."""

import dataclasses
import inspect

import pytest

from configs.base import CompareConfig
from experiments.lib.commands import Models as ExperimentModels
from experiments.lib.commands import Served
from specdec_jax.app import commands
from specdec_jax.app.settings import Settings
from specdec_jax.text.options import Decoding, Drafting, Models, Rules
from specdec_jax.text.pair import build_pair
from specdec_jax.text.strategies import choose

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
