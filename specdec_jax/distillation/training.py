"""One training step of a drafter, and its state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specdec_jax.distillation.batches import Batch
from specdec_jax.distillation.head import Labels, Loss, Sums, build_head_loss
from specdec_jax.models.llama import Llama, LlamaConfig
from specdec_jax.types import Array, Params


@dataclass(frozen=True)
class Schedule:
    """How weights move. Raises ValueError for numbers that make no sense.

    AdamW (arXiv 1711.05101) with decoupled decay of matrices; the rate rises over `warmup` steps and falls along a
    cosine to `final` of its peak at `steps`. `accumulate` batches make a step of the optimiser. `ema`: decay of an
    exponential average of the weights, which is then what is judged and exported (0: none).
    """

    steps: int
    rate: float = 1.5e-3
    warmup: int = 100
    final: float = 0.05
    clip: float = 1.0
    decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    accumulate: int = 1
    ema: float = 0.0

    def __post_init__(self):
        for name in ("steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup must be from 0 to below steps ({self.steps}), got {self.warmup!r}: set schedule.warmup to "
                f"{self.steps // 10}"
            )
        if not 0 <= self.final <= 1 or not 0 <= self.ema < 1 or self.decay < 0:
            raise ValueError(f"final in [0, 1], ema in [0, 1), decay not negative; got {self!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas!r}")

    def rate_at(self) -> optax.Schedule:
        """The learning rate by step of the optimiser."""
        total = max(self.steps // self.accumulate, 1)
        warmup = min(self.warmup, total - 1)
        curve = optax.warmup_cosine_decay_schedule(0.0, self.rate, warmup, total, self.rate * self.final)
        return lambda count: curve(jnp.asarray(count, jnp.float32))


class TrainState(NamedTuple):
    """Everything a resumed run needs besides the step's own batch. Donated by every step."""

    step: Array  # int32, batches seen
    params: Params  # float32
    optimiser: Any
    average: Params | None  # float32, exponential average of the parameters


class Metrics(NamedTuple):
    """Of one step; means over the weighted positions of its batch."""

    loss: Array
    agreement: Array
    acceptance: Array
    surprise: Array
    gradient_norm: Array
    rate: Array
    positions: Array  # weight, in positions


def optimiser(schedule: Schedule) -> optax.GradientTransformation:
    """Clipping, AdamW, accumulation."""

    def matrices(params: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    adam = optax.adamw(schedule.rate_at(), *schedule.betas, weight_decay=schedule.decay, mask=matrices)
    chain = optax.chain(optax.clip_by_global_norm(schedule.clip), adam)
    steps = optax.MultiSteps(chain, schedule.accumulate) if schedule.accumulate > 1 else chain

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            return steps.update(updates, state, params)

    return optax.GradientTransformation(steps.init, update)


def init_state(params: Params, schedule: Schedule) -> TrainState:
    """The state before the first step."""
    average = jax.tree.map(jnp.array, params) if schedule.ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimiser(schedule).init(params), average)


def build_step(
    config: LlamaConfig, schedule: Schedule, loss: Loss, *, dtype: Any = jnp.bfloat16, chunk: int = 512
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step. Compiles once a row length. Master weights are float32, products take `dtype`."""
    objective, update, rate = _objective(config, loss, dtype, chunk), optimiser(schedule), schedule.rate_at()

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        progress = state.step.astype(jnp.float32) / schedule.steps
        (value, sums), gradient = jax.value_and_grad(objective, has_aux=True)(state.params, batch, progress)
        updates, inner = update.update(gradient, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            average = optax.incremental_update(params, average, 1.0 - schedule.ema)
        weight = jnp.maximum(sums.weight, 1e-6)
        means = (sums.agreement / weight, sums.acceptance / weight, sums.surprise / weight)
        now = jnp.asarray(rate(state.step // schedule.accumulate), jnp.float32)
        metrics = Metrics(value, *means, optax.global_norm(gradient), now, sums.weight)
        return TrainState(state.step + 1, params, inner, average), metrics

    return jax.jit(step, donate_argnums=(0,))


def _objective(config: LlamaConfig, loss: Loss, dtype: Any, chunk: int) -> Callable[..., tuple[Array, Sums]]:
    model, head_loss = Llama(config, dtype), build_head_loss(loss, chunk=chunk, dtype=dtype)
    head = "embedding" if config.tie_word_embeddings else "head"

    def objective(params: Params, batch: Batch, progress: Array) -> tuple[Array, Sums]:
        segments = batch.segments
        mask = segments[:, :, None] == segments[:, None, :]
        hidden, _ = model.apply({"params": params}, batch.tokens, None, batch.positions, mask, head=False)
        labels = Labels(batch.weight, batch.following, batch.top, batch.log_prob)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        return head_loss(hidden, params[head][batch.candidates], batch.correction, labels, progress)

    return objective


def build_validation(
    config: LlamaConfig, loss: Loss, *, dtype: Any = jnp.bfloat16, chunk: int = 512
) -> Callable[[Params, Batch], Sums]:
    """`(params, batch) -> sums`: what a step would measure, without taking it."""
    objective = _objective(config, loss, dtype, chunk)
    return jax.jit(lambda params, batch: objective(params, batch, jnp.ones((), jnp.float32))[1])


def judged_params(state: TrainState) -> Params:
    """The parameters that are judged and exported: the average where there is one."""
    return state.params if state.average is None else state.average
