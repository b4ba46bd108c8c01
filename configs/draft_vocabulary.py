"""How many tokens should a drafter propose from: what do fewer rows of its head save, and what acceptance do they cost?

Command:   python -m experiments.compare configs/draft_vocabulary.py
Hardware:  2 x86 cores, 4 GB of memory, nothing else running
Time:      10 minutes; interrupted, the same command with --out goes on
Expected:  total speed-up over plain 1.52 whole; 1.67, 1.61, 1.63, 1.60, 1.48 with 2,048 to 16,384 tokens; nano 1.36,
           with 8,192 tokens 1.38 (a CPU without AMX; a faster one 1.68; 1.89, 1.86, 1.89, 1.87, 1.84; 1.62, 1.72)

The calibrating half: it is what the size in configs/entropy_aware.py was chosen on. Survival gets the measured cost
of the whole drafters (their calibrations have it), and of the others what a pass reads of the target's bytes.
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import survival

SIZES = (2048, 4096, 8192, 12288, 16384)

config = CompareConfig(
    name="draft-vocabulary",
    prompts="configs/prompts/math.jsonl",
    split="calibrate",
    methods=(
        Method("plain", policy=None),
        Method("whole", survival()),
        *(Method(f"{size}", survival(), drafter=f"smollm2-drafter@{size}") for size in SIZES),
        Method("nano", survival(), drafter="smollm2-drafter-nano"),
        Method("nano-8192", survival(), drafter="smollm2-drafter-nano@8192"),
    ),
    temperatures=(0.0,),
    calibration="built-in",
    max_new_tokens=128,
)
