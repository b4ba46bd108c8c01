"""The site's reference lists what is public, and the workflow runs parts that .ci/run has."""

import ast
import re
from pathlib import Path

import specdec_jax
from specdec_jax.text.strategies import TYPES, find_factory, names

ROOT = Path(__file__).resolve().parent.parent
LISTED = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)


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
    assert sorted(LISTED) == sorted(public | {"specdec_jax.hyperparameters.per_row"})


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
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = [*default[1].split(), *re.findall(r"part: (\w+)", workflow), *re.findall(r"run: \.ci/run (\w+)", workflow)]
    assert {*used} <= {*targets}
