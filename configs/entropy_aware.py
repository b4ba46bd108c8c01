"""What do entropy-aware drafting's ingredients bring over standard speculative decoding: length, drafter, lookup?

Command:   python -m experiments.compare configs/entropy_aware.py --prompts configs/prompts/math.jsonl
           (and code.jsonl, mixed.jsonl); greedy, so every output must be the target's
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      5 minutes a file; interrupted, the same command with --out goes on
Expected:  over static: all 1.07 on mathematics, 1.09 on code, 1.25 on mixed; without length 1.02, 1.02, 1.14; without
           lookup 1.04, 1.04, 1.05; with nano 1.10, 1.07, 1.21; by phase 1.00, 1.00, 0.98; lookup alone 0.88, 0.97, 1.34

Only prompts of the judging half; every number is one that the calibrating half chose (`experiments.calibrate`, and for
the lookup's least match a few tries on it). Standard speculative decoding is `static`. `all` is survival's lengths with
the built-in drafter and prompt lookup taking turns; the methods after it leave one ingredient out or put nano in.
"""

from configs.base import CompareConfig, Method
from specdec_jax.analysis.cost_model import load_cost_model
from specdec_jax.stopping import phase_length, static, survival

LONGEST = 7
costs = load_cost_model("configs/costs/cpu.json")
weighed = {
    "drafter_cost": costs.ratio,
    "verification_times": tuple(float(time) for time in costs.pass_times(LONGEST) / costs.plain_pass),
}
BOTH = ("smollm2-drafter", "prompt_lookup")
THREE = ("smollm2-drafter", "smollm2-drafter-nano", "prompt_lookup")
lookup = {"shortest": 4, "longest": 6}

config = CompareConfig(
    name="entropy-aware",
    prompts="configs/prompts/math.jsonl",
    split="judge",
    methods=(
        Method("plain", policy=None),
        Method("static", static),
        Method("all", survival, weighed, drafter=BOTH, drafter_options=lookup),
        Method("without-length", static, drafter=BOTH, drafter_options=lookup),
        Method("without-lookup", survival, weighed),
        Method("with-nano", survival, weighed, drafter=THREE, drafter_options=lookup),
        Method("phase-length", phase_length),
        Method("lookup-only", static, drafter="prompt_lookup"),
    ),
    temperatures=(0.0,),
    calibration="built-in",
    max_new_tokens=128,
    max_draft_length=LONGEST,
)
