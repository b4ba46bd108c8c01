"""Models of other JAX libraries as targets and drafters (docs/your_model.md): tunix (nnx) and gemma (linen).

The libraries themselves are not imported: their models are arguments.
"""

from specdec_jax.contrib.jax_libraries.end_index import from_gemma as from_gemma
from specdec_jax.contrib.jax_libraries.end_index import from_tunix as from_tunix
