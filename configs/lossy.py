"""What does lossy verification buy, and what does it cost? Speed over rejection, and how far texts leave the target.

Command:   python -m experiments.compare configs/lossy.py [--only rejection typical] [--prompts FILE.jsonl]
Hardware:  2 CPU cores, the built-in pair
Time:      20 minutes for 6 prompts, 2 temperatures and 14 verifiers
Expected:  docs/losslessness.md. lenience and typical give more tokens a round the further they relax; easd fewer than
           rejection, since it redraws
"""

from configs.base import CompareConfig, Method
from specdec_jax.stopping import static
from specdec_jax.verification import by_phase, easd, lenience, rejection, typical

VERIFIERS = {
    "rejection": rejection(),
    **{f"lenience-{value:g}": lenience(lenience=value) for value in (0.9, 0.7, 0.5, 0.3, 0.1)},
    "typical": typical(),
    **{f"typical-{e:g}-{d:g}": typical(epsilon=e, delta=d) for e, d in ((0.3, 0.9), (0.03, 0.1))},
    **{f"easd-{value:g}": easd(drafter_entropy=value, target_entropy=value) for value in (1.0, 2.0, 3.0)},
    "easd-calibrated": easd(drafter_entropy=3.4, target_entropy=2.3),
    **{f"by-phase-{value:g}": by_phase(lenience=value) for value in (0.5, 0.3)},
    "by-phase-0.5-easd": by_phase(reasoning=easd(), lenience=0.5),  # relaxes routine phases and tightens the others
}

config = CompareConfig(
    name="lossy",
    prompts="configs/prompts/mixed.jsonl",
    split="judge",
    against="rejection",
    methods=(
        Method("plain", policy=None),
        *(Method(name, static(draft_length=4), verifier=verifier) for name, verifier in VERIFIERS.items()),
    ),
    temperatures=(0.0, 1.0),
    max_new_tokens=128,
    quality=True,
)
