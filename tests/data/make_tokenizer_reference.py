"""Makes tokenizer_reference.json anew: what SmolLM2's tokenizer gives for its 60 strings and 3 chats, without any code
of specdec_jax. A string or a chat that is added to the file (its `ids` or `text` empty) is filled in. To be run as
`python tests/data/make_tokenizer_reference.py SmolLM2-135M-Instruct.Q4_1.gguf`. Needs torch, transformers, gguf, jinja2
and regex. `ids` is GPT-2's byte-pair algorithm in plain Python over the file's vocabulary and merges, after llama.cpp's
two patterns for the pre-tokenizer "smollm" (every digit apart, then GPT-2's words); `transformers` is
AutoTokenizer.from_pretrained(gguf_file=...), which takes GPT-2's words alone. It fails if they differ elsewhere than
where a number (in Unicode's sense) follows white space. Chats are apply_chat_template's.
"""

import json
import re
import sys
from pathlib import Path

import regex
from gguf import GGUFReader
from transformers import AutoTokenizer

OUT = Path(__file__).with_name("tokenizer_reference.json")
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def merge(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Joins the pair of lowest rank, everywhere, until none is left."""
    while len(word) > 1:
        best = min(zip(word, word[1:], strict=False), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        joined, i = [], 0
        while i < len(word):
            two = tuple(word[i : i + 2]) == best
            joined.append("".join(best) if two else word[i])
            i += 2 if two else 1
        word = joined
    return word


def plain_encode(text: str, tokens: list[str], ranks: dict[tuple[str, str], int], special: list[str]) -> list[int]:
    ids, letters, number = {token: i for i, token in enumerate(tokens)}, byte_alphabet(), regex.compile(r"(\p{N})")
    out = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if part in special:
            out.append(ids[part])
            continue
        for piece in number.split(part):
            for word in regex.findall(WORDS, piece):
                out += [ids[token] for token in merge([letters[byte] for byte in word.encode()], ranks)]
    return out


def main(path: Path) -> None:
    fields = GGUFReader(path).fields
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    ranks = {pair: i for i, pair in enumerate(pairs)}
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    before = json.loads(OUT.read_text(encoding="utf-8"))
    chats = [
        chat
        | {"text": theirs.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=chat["open"])}
        for chat in before["chats"]
    ]
    rows = []
    for text in dict.fromkeys([*(row["text"] for row in before["encodings"]), *(chat["text"] for chat in chats)]):
        row = {"text": text, "ids": plain_encode(text, tokens, ranks, special)}
        other = theirs(text, add_special_tokens=False).input_ids
        if other != row["ids"]:
            assert regex.search(r"\s\p{N}", text), f"unexplained difference for {text!r}: {row['ids']} and {other}"
            row["transformers"] = other
        rows.append(row)
    OUT.write_text(json.dumps({"encodings": rows, "chats": chats}, ensure_ascii=True, indent=1) + "\n")
    print(f"{OUT.name}: {len(rows)} encodings, {sum('transformers' in row for row in rows)} differ in transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
