"""The target's log-probabilities of the emitted tokens, from the passes that verified them."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import distributions, pick
from specdec_jax.hyperparameters import host
from specdec_jax.ranges import Between
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Monitor, MonitorState, RoundContext, VerificationResult


class LogProbs(NamedTuple):
    """Log-probabilities of each row's new tokens, nats; entries beyond the emitted tokens are meaningless."""

    raw: Array  # [B, N] float32, at temperature 1 without truncation
    warped: Array  # [B, N] float32, in the sampled distribution: 0 at temperature 0
    tempered: Array  # [B, N] float32, at the row's temperature without truncation; `raw` at temperature 0


class LogProbsState(NamedTuple):
    log_probs: LogProbs
    watched: MonitorState  # state of the wrapped monitor

    @property
    def phase(self) -> Array:
        """[B] int32, if the wrapped monitor has phases."""
        return self.watched.phase


@strategy
def log_probs(longest: Annotated[int, Between(1)] = 2048, monitor: Monitor | None = None) -> Monitor:
    """Gathers the target's log-probability of every emitted token in `state.monitor.log_probs`.

    They equal those of `scoring.score` (`raw` with its default warp, `warped` with the request's, `tempered` with the
    request's temperature alone), up to rounding in passes of other widths. A lossy verifier may emit tokens whose
    `warped` is minus infinity.

    Args:
        longest: N, maximum number of new tokens of a row; later tokens have no entry.
        monitor: a wrapped monitor, such as `phases()`.

    Hyperparameters (`init`): those of the wrapped monitor.
    """

    def init(batch: int, **hyperparameters: Any) -> LogProbsState:
        nothing = host(np.zeros((batch, longest), np.float32))
        watched = () if monitor is None else monitor.init(batch, **hyperparameters)
        return LogProbsState(LogProbs(*[nothing] * len(LogProbs._fields)), watched)

    def observe(
        state: LogProbsState, logits: Array, result: VerificationResult, context: RoundContext
    ) -> LogProbsState:
        tokens = result.tokens[:, : logits.shape[1]]
        seen = distributions(logits[:, : tokens.shape[1]], context.warp)
        place = jnp.arange(longest, dtype=jnp.int32)[None, :] - context.emitted[:, None]  # in this round
        new = (place >= 0) & (place < result.length[:, None])

        assert seen.raw_log_prob is not None  # set by `distributions`
        temperature = jnp.where(context.warp.temperature > 0, context.warp.temperature, 1.0)[:, None]
        scores = seen.raw_log_prob / temperature[:, :, None]
        raw, warped = pick(seen.raw_log_prob, tokens), pick(seen.log_prob, tokens)
        of_round = LogProbs(raw, warped, raw / temperature - jax.nn.logsumexp(scores, axis=-1))
        held = jax.tree.map(
            lambda values, entries: jnp.where(new, jnp.take_along_axis(values, place, axis=1, mode="clip"), entries),
            of_round,
            state.log_probs,
        )
        watched = () if monitor is None else monitor.observe(state.watched, logits, result, context)
        return LogProbsState(held, watched)

    return Monitor(init, observe, {} if monitor is None else monitor.hyperparameters)
