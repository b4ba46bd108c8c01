"""Do stopping rules rank by the clock as they rank in replays, and do predictions agree with the clock?

Command:   (first the costs of the pair, as in configs/evidence.py)
           python -m experiments.compare configs/live_rules.py --drafter smollm2-drafter-reading@8192 --temperatures 0 \
               --costs runs/evidence/reading/costs/cost_model.json --prompts SHORT.jsonl:7 \
               --only static-1 adaedl-keep-0.5 cumulative-0.65 survival survival-bound
           (*reading*; SHORT.jsonl: those of Spec-Bench's questions that have fewer than 1,200 characters, so that they
           fit the 512 slots of the costs, every second one of 480 being here; --only picks the settings of a pair and
           temperature, here at 0.7 static 1, adaedl-keep 0.85, cumulative 0.8, at 1 adaedl-keep 0.65;
           Qwen, 10 GB, after `make coder`: --target runs/coder-1.5b.gguf --drafter runs/coder-0.5b.gguf with
           SHORT.jsonl:10, static-3 adaedl-keep-0.65 cumulative-0.65 confidence-keep-0.8 survival survival-bound, at 0.7
           static-1 adaedl-keep-0.9 cumulative-0.95 confidence-keep-0.95 instead; --drafter smollm2 with adaedl-keep-0.5
           cumulative-0.5, at 0.7 adaedl-keep-0.9 cumulative-0.95: 15 to 20 minutes a temperature)
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      4 minutes a temperature; interrupted, the same command with --out goes on
Expected:  predicted over measured, relative to plain decoding, within 3 % for every rule; docs/results.md#by-the-clock
           has what was found

Static lengths and thresholds are those that replays of the archive choose near these values; Qwen's greedy ones at
other costs. The survival rule is given the costs of the machine it runs on; `survival-bound` is the same price with
AdaEDL's bound in place of the acceptance odds.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import adaedl, at_least, cumulative_confidence, max_confidence, static, survival

config = CompareConfig(
    name="live-rules",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        *(Method(f"static-{n}", static(draft_length=n)) for n in (1, 2, 3)),
        Method("adaedl-0.3", adaedl(threshold=0.3)),
        Method("adaedl-first-0.3", at_least(1, adaedl(threshold=0.3))),
        *(Method(f"adaedl-keep-{x}", adaedl(threshold=x, keep_checked_token=True)) for x in (0.5, 0.65, 0.85, 0.9)),
        *(Method(f"cumulative-{x}", cumulative_confidence(threshold=x)) for x in (0.5, 0.65, 0.8, 0.95)),
        *(Method(f"confidence-keep-{x}", max_confidence(threshold=x, keep_checked_token=True)) for x in (0.8, 0.95)),
        Method("survival", survival()),
        Method("survival-bound", survival(signal="bound")),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=80,
    repeats=1,
    rule_costs=True,
    max_draft_length=15,
)
