"""Do stopping rules rank by the clock as they rank in replays?

Command:   python -m experiments.compare configs/live_rules.py --prompts SPEC_BENCH.jsonl:5
           (48 of its 240 questions, as many of each task; `python -m experiments.policies` replays the same)
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      two hours; interrupted, the same command with --out goes on
Expected:  not measured yet

Static lengths, thresholds and lambda's start are those that replays choose on configs/prompts. The survival rule is
told what `python -m experiments.step_cost` measured on this machine (configs/costs/cpu.json).
"""

from configs.base import CompareConfig, Method
from specdec_jax.analysis.cost_model import load_cost_model
from specdec_jax.stopping import adaedl, cumulative_confidence, max_confidence, static, survival

LONGEST = 7
costs = load_cost_model("configs/costs/cpu.json")
times = tuple(float(time) for time in costs.pass_times(LONGEST) / costs.plain_pass)
keep = {"keep_checked_token": True}

config = CompareConfig(
    name="live-rules",
    prompts="configs/prompts/demo.jsonl",
    methods=(
        Method("plain", policy=None),
        Method("static-2", static, numbers={"draft_length": 2}),
        Method("static-3", static, numbers={"draft_length": 3}),
        Method("adaedl", adaedl, numbers={"threshold": 0.3}),
        Method("adaedl-keep", adaedl, numbers={"threshold": 0.3}, structure=keep),
        Method("max-confidence-keep", max_confidence, numbers={"threshold": 0.5}, structure=keep),
        Method("cumulative-confidence", cumulative_confidence, numbers={"threshold": 0.3}),
        Method("survival", survival, numbers={"drafter_cost": costs.ratio, "verification_times": times}),
    ),
    temperatures=(0.0, 0.7, 1.0),
    max_new_tokens=128,
    repeats=3,
    max_draft_length=LONGEST,
)
