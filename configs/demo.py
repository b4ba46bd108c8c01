"""Does AdaEDL decode a real model faster than plain decoding and than fixed draft lengths, with the same output?

Command:   make demo        (python -m experiments.compare configs/demo.py)
Hardware:  2 x86 cores, 4 GB of memory; no accelerator needed
Time:      under 6 minutes after the install
Expected:  2 cores: plain 67 and 67 tokens/s; total speed-up greedy 1.61, 1.36, 1.30, 1.58, 1.68, 1.80 (the rows in
           order), at 0.8 1.28, 0.96, 1.17, 1.24, 1.31, 1.44; greedy outputs equal but for near ties of static-7

The target is SmolLM2-135M-Instruct, the drafter the one in the package. Lambda starts at 0.3, the least of the paper's
grid. `adaedl-keep` is our variant, in which the distribution that fails the check still gives its token; `survival` is
our rule, at its defaults; `survival-8192` the same with a drafter that proposes the 8,192 most frequent tokens only.
The twelve prompts are frozen: change a copy. The spread is taken over prompts, from one timed pass each; for a
benchmark raise --repeats.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, static, survival

config = CompareConfig(
    name="demo",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("static-3", static(draft_length=3)),
        Method("static-7", static(draft_length=7)),
        Method("adaedl", adaedl(threshold=0.3)),
        Method("adaedl-keep", adaedl(threshold=0.3, keep_checked_token=True)),
        Method("survival", survival()),
        Method("survival-8192", survival(), drafter="smollm2-drafter@8192"),
    ),
    temperatures=(0.0, 0.8),
    max_new_tokens=64,
)
