"""How do stopping rules compare by the clock on a real pair, Qwen2.5-Coder-Instruct 1.5B with 0.5B?

Command:   make coder       (the weights, 1.6 GB, once)
           python -m experiments.compare configs/coder.py --prompts PROMPTS.jsonl
           (with a model hub: --target Qwen/Qwen2.5-Coder-1.5B-Instruct --drafter Qwen/Qwen2.5-Coder-0.5B-Instruct)
Hardware:  2 x86 cores, 10 GB of memory, nothing else running
Time:      16 minutes for six prompts, all included; interrupted, the same command goes on with --out
Expected:  docs/results.md, "By the clock"

The thresholds and the static length are those that replays of other prompts choose on this pair.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, at_least, max_confidence, static, survival

config = CompareConfig(
    name="coder",
    prompts="configs/prompts/code.jsonl:4",
    target="runs/coder-1.5b.gguf",
    drafter="runs/coder-0.5b.gguf",
    methods=(
        Method("plain", policy=None),
        Method("static-3", static(draft_length=3)),
        Method("adaedl", adaedl(threshold=0.5)),
        Method("adaedl-first", at_least(1, adaedl(threshold=0.5))),
        Method("adaedl-keep", adaedl(threshold=0.65, keep_checked_token=True)),
        Method("max-confidence-keep", max_confidence(threshold=0.65, keep_checked_token=True)),
        Method("survival", survival()),
    ),
    temperatures=(0.0, 0.7),
    max_new_tokens=48,
    max_draft_length=15,
)
