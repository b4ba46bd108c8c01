"""The vocabulary of specdec_jax: every NamedTuple and the type of every function. No logic lives here.

Axis legend, used in every comment, docstring and einsum of the project:

    B  rows (independent requests)          V  vocabulary
    T  tokens fed in one pass               L  layers
    K  maximum draft length                 H  attention heads
    S  cache slots                          D  width of the model
    E  slots of an encoder's source

Conventions: probabilities are float32 natural logarithms, entropies are in nats, lengths and tokens are int32.
Arguments of a factory are static (options); arguments of ``init`` are traced (hyperparameters): a sweep compiles once.
"""

from specdec_jax.types.draft_model import *  # noqa: F403
from specdec_jax.types.seams import *  # noqa: F403
from specdec_jax.types.values import *  # noqa: F403
