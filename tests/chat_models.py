"""Tiny models to talk to: with a template that opens the assistant's turn, and a longer context."""

import json
from pathlib import Path

from tiny_pair import write_pair

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_chat_pair(folder: Path, context: int = 2048) -> tuple[str, str]:
    """(target, drafter) as `write_pair` has them, with that template and a longer context."""
    pair = write_pair(folder)
    for name in pair:
        change_json(Path(name) / "config.json", max_position_embeddings=context)
        change_json(Path(name) / "tokenizer_config.json", chat_template=TEMPLATE)
    return pair


def change_json(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
