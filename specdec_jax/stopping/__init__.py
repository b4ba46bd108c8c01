"""Draft-stopping policies, one per file; the factory has the file's name."""

from specdec_jax.stopping._thresholded import thresholded as thresholded
from specdec_jax.stopping.accepted_length_ema import accepted_length_ema as accepted_length_ema
from specdec_jax.stopping.adaedl import adaedl as adaedl
from specdec_jax.stopping.adaptive_gamma import adaptive_gamma as adaptive_gamma
from specdec_jax.stopping.at_least import at_least as at_least
from specdec_jax.stopping.bandit import bandit as bandit
from specdec_jax.stopping.cumulative_confidence import cumulative_confidence as cumulative_confidence
from specdec_jax.stopping.draft_and_verify import draft_and_verify as draft_and_verify
from specdec_jax.stopping.gamma_tuning import gamma_tuning as gamma_tuning
from specdec_jax.stopping.goodput import goodput as goodput
from specdec_jax.stopping.hf_confidence import hf_confidence as hf_confidence
from specdec_jax.stopping.hf_heuristic import hf_heuristic as hf_heuristic
from specdec_jax.stopping.max_confidence import max_confidence as max_confidence
from specdec_jax.stopping.phase_length import phase_length as phase_length
from specdec_jax.stopping.policy_bandit import policy_bandit as policy_bandit
from specdec_jax.stopping.static import static as static
from specdec_jax.stopping.survival import survival as survival
from specdec_jax.stopping.svip import svip as svip
from specdec_jax.stopping.update_every import update_every as update_every

# Default functions, for user-defined policies.
from specdec_jax.types.seams import always as always
from specdec_jax.types.seams import no_update as no_update
