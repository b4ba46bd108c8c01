"""What do entropy-aware drafting's ingredients bring over standard speculative decoding: length, drafter, lookup, head?

Command:   python -m experiments.compare configs/entropy_aware.py --prompts configs/prompts/math.jsonl
           (and code.jsonl, mixed.jsonl); greedy, so every output must be the target's
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      6 minutes a file; interrupted, the same command with --out goes on
Expected:  over static on mathematics, code, mixed text: all 1.14, 1.21, 1.41; without length 1.12, 1.13, 1.25; without
           lookup 1.13, 1.13, 1.15; without the draft vocabulary 1.05, 1.13, 1.44; with nano 1.17, 1.19, 1.43; the draft
           vocabulary alone 1.11, 1.09, 1.04; by phase 0.99, 1.01, 0.98; lookup alone 0.89, 1.06, 1.44; on another day
           all 1.12, 1.18, 1.57; reading 1.13, 1.19, 1.71; reading with combs 1.14, 1.22, 1.62

Only prompts of the judging half; every hyperparameter is one that the calibrating half chose (`experiments.calibrate`,
and for the lookup's least match and the size of the draft vocabulary a few tries on it). `static` is standard
speculative decoding. `all` is survival's lengths, with the built-in drafter's 8,192 most frequent tokens and prompt
lookup taking turns; the methods after it leave one ingredient out, put nano in, or have a single ingredient.
"""

from configs.base import CompareConfig, Method
from specdec_jax.contrib.trees import survival_tree
from specdec_jax.stopping import phase_length, static, survival

LONGEST = 7
WHOLE, FEW, NANO = "smollm2-drafter", "smollm2-drafter@8192", "smollm2-drafter-nano@8192"
READING = "smollm2-drafter-reading@8192"
RULE, COMBS = survival(positions=LONGEST), survival_tree(siblings=3)
LOOKUP = "prompt_lookup(shortest=4, longest=6)"

config = CompareConfig(
    name="entropy-aware",
    prompts="configs/prompts/math.jsonl",
    split="judge",
    against="static",
    methods=(
        Method("plain", policy=None),
        Method("static", static()),
        Method("all", RULE, drafter=(FEW, LOOKUP)),
        Method("without-length", static(), drafter=(FEW, LOOKUP)),
        Method("without-lookup", RULE, drafter=FEW),
        Method("without-draft-vocabulary", RULE, drafter=(WHOLE, LOOKUP)),
        Method("reading", RULE, drafter=(READING, LOOKUP)),
        Method("reading-combs", COMBS, drafter=(READING, LOOKUP)),
        Method("with-nano", RULE, drafter=(FEW, NANO, LOOKUP)),
        Method("static-8192", static(), drafter=FEW),
        Method("phase-length", phase_length()),
        Method("lookup-only", static(), drafter="prompt_lookup"),
    ),
    temperatures=(0.0,),
    calibration="built-in",
    max_new_tokens=128,
    max_draft_length=LONGEST,
)
