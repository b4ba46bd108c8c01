"""What `sd.citations` and `--cite` print."""

import re
import sys

import jax.numpy as jnp
import pytest

import specdec_jax as sd
from specdec_jax.contrib.block import block
from specdec_jax.drafters.draft_models.llama_reading import language_model, reading_config
from specdec_jax.drafters.draft_models.reduced_head import with_reduced_head
from specdec_jax.drafters.reading import reading as read
from specdec_jax.models import llama
from specdec_jax.text.citations import ALWAYS, ARXIV, references
from specdec_jax.text.strategies import TYPES, choose, find_factory, names

BUILT_IN = [(kind, name) for kind in TYPES for name in names(kind)]


def ids(text: str) -> set[str]:
    return set(re.findall(r"eprint = \{(.+?)\}", text)) - {*ALWAYS.split()}


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_every_paper_that_a_strategy_names_has_an_entry(kind, name):
    about = sys.modules[find_factory(kind, name).__module__].__doc__
    assert set(ARXIV.findall(str(about))) <= references().keys()


def test_entries_are_whole_and_each_is_somebodys_source():
    modules = [sys.modules[find_factory(kind, name).__module__] for kind, name in BUILT_IN]
    elsewhere = "specdec_jax.drafters.draft_models", block.__module__
    modules += [module for name, module in sys.modules.items() if name.startswith(elsewhere)]
    named = ALWAYS + "\n".join(str(module.__doc__) for module in modules)
    assert [source for source in references() if source not in named] == []
    for entry in references().values():
        assert entry.count("{") == entry.count("}") and all(
            f"{word} = {{" in entry for word in ("title", "author", "year")
        )


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
