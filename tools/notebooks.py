"""The notebooks of docs/examples from a page and an example, executed, with what they print.

Command:   python tools/notebooks.py [FOLDER], with nbclient and ipykernel, and for the second google-tunix
           (requirements-jax-libraries.txt has all; tests/models/test_jax_libraries.py shows how they are installed)
Time:      three minutes on 2 cores
Output:    any_model.ipynb (the cells are docs/your_model.md) and tunix_grpo.ipynb in FOLDER, docs/examples unless given
"""

import platform
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
INSTALL = """\
import sys

sys.path.insert(0, "../..")  # the clone
if "google.colab" in sys.modules:  # after `!git clone` of the repository and `%cd specdec_jax/docs/examples`
    %pip install -q -r ../../requirements.txt{more}"""
TUNIX = [
    "# GRPO of tunix with speculative rollouts\n\nA tiny Qwen3 of tunix learns to answer in digits. The rollouts are "
    "those of a sampler of specdec_jax, whose drafter learns from the answers after every fifth step. The code is in "
    "`tunix_grpo.py`, beside this notebook, and explained on the page docs/training.md, \"With tunix\".",
    INSTALL.format(more=" google-tunix"),
    "## The rollout engine",
    "import inspect\nimport tempfile\nfrom pathlib import Path\n\nimport tunix_grpo\n\n"
    "print(inspect.getsource(tunix_grpo.SpecRollout))",
    "## Twelve steps with every engine\n\n8 prompts a step, 8 answers to each; the reward is the share of digits.",
    "folder = Path(tempfile.mkdtemp())\ntunix_grpo.main(folder, steps=12, seeds=1)",
    "Reward and acceptance by step; one seed, so there are no intervals.",
    "from IPython.display import Image\n\nImage(folder / \"grpo.png\")",
]  # fmt: skip


def cells(page: str) -> list[str]:
    """A page's text and Python blocks in turns, beginning with text; links lead to the pages beside the notebook."""
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)
    text = [
        re.sub(r"\]\((?!http)(examples/)?", lambda match: "](" if match[1] else "](../", part) for part in parts[::2]
    ]
    both = [part.strip() for pair in zip(text, [*parts[1::2], ""], strict=True) for part in pair]
    first = text[0].strip().partition("\n\n")
    return [first[0], INSTALL.format(more=""), first[2], *both[1:-1]]


def notebook(sources: list[str]) -> dict[str, Any]:
    """Text and code in turns as a notebook that was not run."""
    made = []
    for at, source in enumerate(sources):
        if not source:
            continue
        cell = {"cell_type": "code" if at % 2 else "markdown", "id": f"cell-{at}", "metadata": {}, "source": source}
        made.append(cell | ({"execution_count": None, "outputs": []} if at % 2 else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def sources() -> dict[str, list[str]]:
    """Name -> text and code in turns."""
    return {"any_model": cells((ROOT / "docs" / "your_model.md").read_text(encoding="utf-8")), "tunix_grpo": TUNIX}


def main(folder: Path) -> None:
    import nbclient
    import nbformat

    from specdec_jax.costs.machine import device

    for name, parts in sources().items():
        book = nbformat.from_dict(notebook(parts))
        nbclient.NotebookClient(book, timeout=900, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
        for cell in book.cells:  # without warnings and progress, which have paths and times of the machine
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        ran = f"Run on {device()}, Python {platform.python_version()}."
        book.cells.append(nbformat.v4.new_markdown_cell(ran, id="hardware"))
        nbformat.write(book, folder / f"{name}.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else EXAMPLES)
