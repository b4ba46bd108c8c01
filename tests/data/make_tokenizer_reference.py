"""Makes tokenizer_reference.json: what SmolLM2's tokenizer gives for 60 strings, without any code of specdec_jax.

    python tests/data/make_tokenizer_reference.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers, gguf, jinja2 and regex (none of which the tests need). Two references are made and compared:

`ids`: GPT-2's byte-pair algorithm in plain Python over the file's own vocabulary and merges, after the two patterns
llama.cpp applies for the pre-tokenizer "smollm" (every digit apart, then GPT-2's words).
`transformers`: AutoTokenizer.from_pretrained(gguf_file=...), which knows no "smollm" and takes GPT-2's words alone. The
two may differ only where a number (in Unicode's sense) follows white space; the script fails if they differ elsewhere.
Chat renderings are transformers' apply_chat_template.
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

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "Why is the sky blue?",
    "The quick brown fox jumps over the lazy dog.",
    "It's what they've said, isn't it? We'll see; I'd go, you're in, I'm out.",
    "IT'S SHOUTING, DON'T",
    "0",
    "12345678901234567890",
    "3.14159 and 2,718,281.828",
    "In 2024, 7 of 10 people had 1 phone.",
    "two  spaces  before  12 and   345",
    "x=1;y =2; z= 3",
    "1st 2nd 3rd 4th; B2B, H2O, covid19",
    "2024-11-21T05:31:00Z +49 (0)30 1234-567",
    "½ ² ³ Ⅳ ① ٣٤ 四 १२",
    "temp:  ²³ and\t7\n8",
    "   leading and trailing   ",
    "\ttab\t\ttabs\t",
    "\n",
    "\n\n\n",
    "line one\nline two\r\nline three\n\n  indented",
    "trailing newline\n",
    "a\u00a0b\u2003c\u3000d",
    "zero\u200bwidth\u200djoiner\ufeff",
    "café naïve façade",
    "cafe\u0301 (decomposed)",
    "Die Straße ist größer als gewöhnlich, Ärger über Öl.",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "你好，世界。今天天气很好",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🙂",
    "emoji 😀😃 mixed 👨‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪",
    "👍🏽 skin tone",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐍈",
    "price: €5, £10, ¥1000, $3.50 ± 5%",
    "∑_{i=0}^{n} x_i² ≤ ∫ f(x) dx → ∞",
    "def f(x):\n    return x ** 2  # square\n",
    'if (a && b || !c) { printf("%d\\n", i++); }',
    "SELECT * FROM users WHERE id=42 AND name LIKE '%o''brien%';",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    '<div class="x">&nbsp;&lt;tag&gt;</div><!-- comment -->',
    "https://example.org/path?q=1&r=two#frag user@example.com",
    "C:\\Users\\name\\file.txt ../../up ~/home",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "!!!??? ... --- *** ### ~~~ ``` >>> ===",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism Donaudampfschifffahrt",
    "<|im_start|>user\nHi there 12<|im_end|>\n",
    "<|endoftext|><|im_start|><|im_end|>",
    "text<|endoftext|>text <|im_end|> spaced",
    "<|im_start|><|im_star|> <|not_special|> <repo_name>x/y<file_sep>z<empty_output>",
    "<jupyter_code>print(1 + 22)<jupyter_output>23",
]

CHATS = [
    [{"role": "user", "content": "What is 12 times 34?"}],
    [{"role": "system", "content": "Answer in German."}, {"role": "user", "content": "Good  morning!\n"}],
    [
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Count:  1 2 3"},
    ],
]


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

    chats = [
        {
            "messages": messages,
            "open": generate,
            "text": theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate),
        }
        for messages in CHATS
        for generate in (True, False)
    ]
    assert len(TEXTS) == len(set(TEXTS)) == 60
    rows = []
    for text in [*TEXTS, *(chat["text"] for chat in chats)]:
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
