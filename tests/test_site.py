"""The site's reference lists what is public, and the workflow runs parts that .ci/run has."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import specdec_jax
from specdec_jax.models import adapters
from specdec_jax.text.strategies import TYPES, find_factory, names

ROOT = Path(__file__).resolve().parent.parent
LISTED = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)

PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.stem != "reference")]
TEXTS = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


def offered(package: str) -> set[str]:
    """What a package's __init__ imports from its files."""
    tree = ast.parse((ROOT / "specdec_jax" / package / "__init__.py").read_text(encoding="utf-8"))
    return {str(alias.asname) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_the_reference_lists_every_public_name_once():
    folders = {"stopping", "verification", "drafters"}
    public = {f"specdec_jax.{name}" for name in {*specdec_jax.__all__} - folders - {"__version__"}}
    strategies = {f"{find_factory(kind, name).__module__}.{name}" for kind in TYPES for name in names(kind)}
    parts = {
        f"specdec_jax.{folder}.{name}"
        for folder in folders
        for name in offered(folder)
        if f"specdec_jax.{folder}.{name}.{name}" not in strategies
    }
    public |= strategies | parts | {f"specdec_jax.types.{name}" for name in offered("types")}
    functions = [each for each in vars(adapters).values() if inspect.isfunction(each)]
    made = [each.__name__ for each in functions if "LanguageModel" in str(inspect.signature(each).return_annotation)]
    public |= {f"specdec_jax.models.adapters.{name}" for name in made}
    others = {*LISTED} - public
    assert public < {*LISTED} and len({*LISTED}) == len(LISTED) and "specdec_jax.models.adapters.from_nnx" in public
    assert [name for name in others if not re.search(rf"\b{name.split('.')[-1]}\b", TEXTS)] == []


def value_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def test_what_the_pages_import_is_in_the_reference():
    """By value: a strategy is listed by its file, and pages import it from its package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXTS, re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    used = {
        f"{node.module}.{alias.name}" for node in nodes for alias in node.names if "specdec_jax." in f"{node.module}."
    }
    listed = {id(value_of(name)) for name in LISTED}
    missing = {name for name in used - {"specdec_jax.models.olmo"} if id(value_of(name)) not in listed}
    assert {name for name in missing if getattr(value_of(name), "__module__", "") not in LISTED} == set() != used


def test_every_page_has_one_place_in_the_site():
    placed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    roots = {"index.md", "contributing.md", "changelog.md"}  # README and the others, by tools/docs_pages.py
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(name for name in placed if name not in roots) == sorted(pages)


def test_the_workflow_and_the_script_have_the_same_parts():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    listed = re.search(r"part: \[(.*)\]", workflow)
    default = re.search(r"\$\{@:-(.*)\}", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert listed and default and listed[1].replace(",", "") == default[1]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = [
        *default[1].split(),
        *re.findall(r"part: ([\w-]+)", workflow),
        *re.findall(r"run: \.ci/run ([\w-]+)", workflow),
    ]
    assert {*used} <= {*targets}
