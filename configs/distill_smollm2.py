"""How good a drafter for SmolLM2-135M-Instruct do two CPU cores make in an afternoon?

Command:   python -m experiments.distill configs/distill_smollm2.py
           (with the texts that docs/distillation.md names in runs/texts; without, descriptions of packages serve)
Hardware:  2 x86 cores, 8 GB of memory; a GPU if there is one
Time:      about 75 minutes of writing, 30 of training and 5 of judging, on an idle machine
Expected:  held-out acceptance 0.61; greedy agreement 0.59 along greedy answers to Spec-Bench, 0.49 along those at 0.7
"""

from configs.base_distillation import DistillConfig
from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.training import Schedule

config = DistillConfig(
    name="distill-smollm2",
    tokens=1_550_000,
    held_out=("configs/prompts/demo.jsonl",),
    shape=Shape(layers=4, width=224, heads=4, kv_heads=2, head_dim=64, hidden=768, init="induction", rope_theta=1e8),
    packing=Packing(slots=(448, 896), tokens=3584, candidates=8192, sampled=1024),
    schedule=Schedule(steps=2600, rate=1.5e-3, warmup=100),
    intervals=Intervals(save_every=200, log_every=20),
    seed=11,
)
