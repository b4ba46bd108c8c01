"""Do siblings beside the chain pay by the clock, as replays say that they do?

Command:   python -m experiments.compare configs/combs.py
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      25 minutes for 18 prompts; interrupted, the same command with --out goes on
Expected:  docs/combs.md, "By the clock"

The drafter reads its target and has a draft vocabulary, the default of the command line; only prompts of the judging
half, since h was counted on the other one. `comb` has a fixed shape that a width of eight holds; `comb-bare` over
`static-3` is what drawing siblings and a mask cost where none is verified.
"""

from configs.base import CompareConfig, Method
from specdec_jax.contrib.trees import comb, survival_tree, traversal
from specdec_jax.stopping import static, survival

config = CompareConfig(
    name="combs",
    prompts="configs/prompts/math.jsonl",
    split="judge",
    against="survival",
    drafter="smollm2-drafter-reading@8192",
    methods=(
        Method("plain", policy=None),
        Method("survival", survival()),
        Method("survival-siblings", survival_tree(siblings=3)),
        Method("survival-siblings-traversal", survival_tree(siblings=3), verifier=traversal()),
        Method("comb", comb(links=3, siblings=(2, 1, 1))),
        Method("static-3", static(draft_length=3)),
        Method("comb-bare", comb(links=3, siblings=(0,))),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=96,
)
