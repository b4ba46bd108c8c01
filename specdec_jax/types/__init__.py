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

from specdec_jax.types.draft_model import DraftModel as DraftModel
from specdec_jax.types.draft_model import Reading as Reading
from specdec_jax.types.draft_model import ReducedHead as ReducedHead
from specdec_jax.types.seams import Begin as Begin
from specdec_jax.types.seams import Check as Check
from specdec_jax.types.seams import Commit as Commit
from specdec_jax.types.seams import Drafter as Drafter
from specdec_jax.types.seams import Forward as Forward
from specdec_jax.types.seams import Hidden as Hidden
from specdec_jax.types.seams import Init as Init
from specdec_jax.types.seams import InitCache as InitCache
from specdec_jax.types.seams import InitDrafter as InitDrafter
from specdec_jax.types.seams import InTurn as InTurn
from specdec_jax.types.seams import LanguageModel as LanguageModel
from specdec_jax.types.seams import Monitor as Monitor
from specdec_jax.types.seams import Next as Next
from specdec_jax.types.seams import NextDistribution as NextDistribution
from specdec_jax.types.seams import Observe as Observe
from specdec_jax.types.seams import Observer as Observer
from specdec_jax.types.seams import Proceed as Proceed
from specdec_jax.types.seams import Seen as Seen
from specdec_jax.types.seams import Source as Source
from specdec_jax.types.seams import StoppingPolicy as StoppingPolicy
from specdec_jax.types.seams import Update as Update
from specdec_jax.types.seams import Verifier as Verifier
from specdec_jax.types.seams import Verify as Verify
from specdec_jax.types.values import Array as Array
from specdec_jax.types.values import Cache as Cache
from specdec_jax.types.values import DecodeState as DecodeState
from specdec_jax.types.values import Distribution as Distribution
from specdec_jax.types.values import Draft as Draft
from specdec_jax.types.values import DrafterState as DrafterState
from specdec_jax.types.values import LoopResult as LoopResult
from specdec_jax.types.values import ModelSpec as ModelSpec
from specdec_jax.types.values import MonitorState as MonitorState
from specdec_jax.types.values import Params as Params
from specdec_jax.types.values import PolicyState as PolicyState
from specdec_jax.types.values import RoundContext as RoundContext
from specdec_jax.types.values import RoundInfo as RoundInfo
from specdec_jax.types.values import SourceSpec as SourceSpec
from specdec_jax.types.values import Statistics as Statistics
from specdec_jax.types.values import VerificationResult as VerificationResult
from specdec_jax.types.values import VerifierState as VerifierState
from specdec_jax.types.values import Warp as Warp
