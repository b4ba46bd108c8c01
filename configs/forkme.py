"""Copy this file and put your question here: what would you like to know?

Command:   python -m experiments.compare configs/forkme.py
           python -m experiments.compare configs/forkme.py --limit 2 --max-new-tokens 16   (a quick look)
Hardware:  what you ran it on
Time:      what it took
Expected:  the numbers a reader should get, from your run's table.md

A policy is an import. Your own: a file with a factory `my_rule(...) -> StoppingPolicy` beside this one, then
`from my_rule import my_rule` and `Method("mine", my_rule(floor=0.5))`. docs/extending.md writes one. Methods that
differ in hyperparameters alone, as the thresholds below, are compiled once.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, static

config = CompareConfig(
    name="forkme",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("static-4", static(draft_length=4)),
        *(Method(f"adaedl-{value}", adaedl(threshold=value)) for value in (0.5, 0.7, 0.9)),
        Method("adaedl-keep", adaedl(keep_checked_token=True)),
    ),
    temperatures=(0.0,),
    max_new_tokens=64,
)
