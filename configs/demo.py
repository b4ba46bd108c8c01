"""Does AdaEDL decode a real model faster than plain decoding, and is anything faster, with the same output?

Command:   make demo        (python -m experiments.compare configs/demo.py)
Hardware:  2 x86 cores, 4 GB of memory; no accelerator needed
Time:      5:10 with the install on 2 cores without AMX, nothing compiled or measured before
Expected:  there, total speed-up greedy 1.10, 1.23, 1.43, 1.39 (rows in order), at 0.8 0.84, 1.07, 1.21, 1.30, in a
           noisy hour (in a quiet one the first three 1.18, 1.59, 1.52 and 1.06, 1.35, 1.43); greedy outputs equal but
           for near ties. With AMX, all twelve prompts, the first three: 1.30, 1.68, 1.80 and 1.17, 1.31, 1.44

Six of the twelve frozen prompts and five methods. The rest is one option away:

  make demo ARGS="--only"                                         all nine methods
  make demo ARGS="--only static-3 adaedl adaedl-keep"             some of them, plain decoding always
  make demo ARGS="--only --prompts configs/prompts/demo.jsonl"    and all twelve prompts
  make demo ARGS="--temperatures 0 --repeats 3"                   what else can be changed: ARGS=--help

The target is SmolLM2-135M-Instruct, the drafter the one in the package. Lambda starts at 0.3, the least of the paper's
grid. `adaedl-first` drafts the first token unchecked; in `adaedl-keep`, our variant, the distribution that fails the
check still gives its token; `survival` is our rule, at its defaults; `survival-8192` the same with a drafter that
proposes the 8,192 most frequent tokens and the text's own rare ones; `survival-reading` with one that also reads the
target's hidden states.
The prompts are frozen: change a copy. The spread is taken over prompts, from one timed pass each; for a benchmark raise
--repeats.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, at_least, static, survival

config = CompareConfig(
    name="demo",
    prompts="configs/prompts/demo.jsonl:2",  # every second one
    methods=(
        Method("plain", policy=None),
        Method("static-3", static(draft_length=3)),
        Method("static-7", static(draft_length=7)),
        Method("adaedl", adaedl(threshold=0.3)),
        Method("adaedl-first", at_least(1, adaedl(threshold=0.3))),
        Method("adaedl-keep", adaedl(threshold=0.3, keep_checked_token=True)),
        Method("survival", survival()),
        Method("survival-8192", survival(), drafter="smollm2-drafter@8192"),
        Method("survival-reading", survival(), drafter="smollm2-drafter-reading@8192"),
    ),
    only=("adaedl", "survival", "survival-8192", "survival-reading"),
    temperatures=(0.0, 0.8),
    max_new_tokens=64,
)
