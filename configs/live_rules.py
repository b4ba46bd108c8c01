"""Do stopping rules rank by the clock as they rank in replays, and do predictions agree with the clock?

Command:   python -m experiments.compare configs/live_rules.py --prompts SPEC_BENCH.jsonl:6 --temperatures 0 \
               --only static-3 adaedl-keep-0.4 cumulative-0.35 survival survival-bound
           (SmolLM2 with `smollm2-drafter`, *base*; --drafter smollm2-drafter-reading@8192 for *reading*; 40 of its 240
           questions; --only picks the settings of a pair and temperature, here at 0, 0.7 and 1 static 3,
           3, 2, adaedl-keep 0.4, 0.6, 0.3, cumulative 0.35, 0.6, 0.1. Qwen, 10 GB: --target runs/coder-1.5b.gguf
           --drafter runs/coder-0.5b.gguf, after `make coder`)
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      10 minutes a temperature; interrupted, the same command with --out goes on
Expected:  total speed-up over plain, greedy / 0.7 / 1: survival 1.69 / 1.46 / 1.45, survival-bound 1.63 / 1.48 / 1.38,
           adaedl-keep 1.68 / 1.39 / 1.25, cumulative 1.70 / 1.45 / 1.40, static 1.55 / 1.46 / 1.33

Static lengths and thresholds are those that replays choose on configs/prompts. The survival rule is given the costs of
the machine it runs on; `survival-bound` is the same price with AdaEDL's bound in place of the acceptance odds.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, at_least, cumulative_confidence, max_confidence, static, survival

config = CompareConfig(
    name="live-rules",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        *(Method(f"static-{n}", static(draft_length=n)) for n in (2, 3)),
        Method("adaedl-0.3", adaedl(threshold=0.3)),
        Method("adaedl-first-0.3", at_least(1, adaedl(threshold=0.3))),
        *(
            Method(f"adaedl-keep-{x}", adaedl(threshold=x, keep_checked_token=True))
            for x in (0.3, 0.4, 0.5, 0.6, 0.65, 0.85)
        ),
        *(Method(f"cumulative-{x}", cumulative_confidence(threshold=x)) for x in (0.1, 0.35, 0.5, 0.6, 0.65, 0.8)),
        *(Method(f"confidence-keep-{x}", max_confidence(threshold=x, keep_checked_token=True)) for x in (0.5, 0.8)),
        Method("survival", survival()),
        Method("survival-bound", survival(signal="bound")),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=80,
    repeats=1,
    rule_costs=True,
    max_draft_length=15,
)
