"""One training step of a drafter, and its state."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.distillation.batches import Batch, Packing
from specdec_jax.distillation.head import Labels, Sums, build_head_loss
from specdec_jax.distillation.losses import Loss
from specdec_jax.distillation.unrolled import Texts, Unroll, unrolled
from specdec_jax.distillation.writing import check_layers, with_hidden
from specdec_jax.drafters.draft_models.llama_reading import LlamaReadingConfig
from specdec_jax.loading.families import family_of
from specdec_jax.meshes import everywhere, over_rows, row_groups
from specdec_jax.models.decoder_only import Decoder
from specdec_jax.ranges import Between, check_fields
from specdec_jax.sharding import DATA, mesh_here
from specdec_jax.types import Array, LanguageModel, Params

WHOLE = ("candidates", "correction")  # fields of a batch that are replicated on a mesh; rows are sharded
BY_ROW = Batch(*(name not in WHOLE for name in Batch._fields))  # type: ignore[arg-type]
FADE = 0.8  # relative weight of each further unrolled step, because later drafts are less frequent


@dataclass(frozen=True)
class Schedule:
    """The optimisation schedule. Raises ValueError for invalid numbers.

    AdamW (arXiv 1711.05101) with decoupled decay of matrices; the rate rises over `warmup` steps and falls along a
    cosine to `final` of its peak at `steps`. Each step of the optimiser takes `accumulate` batches. `ema`: decay,
    a batch, of an exponential average of the weights, which is then evaluated and exported (0: none).
    """

    steps: Annotated[int, Between(1)]
    rate: Annotated[float, Between(0, open="low")] = 1.5e-3
    warmup: Annotated[int, Between(0)] = 100
    final: Annotated[float, Between(0, 1)] = 0.05
    clip: Annotated[float, Between(0, open="low")] = 1.0
    decay: Annotated[float, Between(0)] = 0.05
    betas: Annotated[tuple[float, float], Between(0, 1, open="high")] = (0.9, 0.95)
    accumulate: Annotated[int, Between(1)] = 1
    ema: Annotated[float, Between(0, 1, open="high")] = 0.0

    def __post_init__(self):
        check_fields(self)
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup must be from 0 to below steps ({self.steps}), got {self.warmup!r}: set schedule.warmup to "
                f"{self.steps // 10}"
            )

    def rate_at(self) -> optax.Schedule:
        """The learning rate by step of the optimiser."""
        total = max(self.steps // self.accumulate, 1)
        warmup = min(self.warmup, total - 1)
        curve = optax.warmup_cosine_decay_schedule(0.0, self.rate, warmup, total, self.rate * self.final)
        return lambda count: curve(jnp.asarray(count, jnp.float32))


class TrainState(NamedTuple):
    """The state of a run, except the batches. Donated by every step."""

    step: Array  # int32, number of batches so far
    params: Params  # float32
    optimiser: Any
    average: Params | None  # float32, exponential average of the parameters


class Metrics(NamedTuple):
    """Means over the weighted positions of a step's batch. For drafters that read their target, `loss` is over all
    unrolled steps, the other fields are for the first one, where the target is read."""

    loss: Array
    agreement: Array
    acceptance: Array
    surprise: Array
    gradient_norm: Array
    rate: Array
    positions: Array  # weight, in positions
    last_agreement: Array  # agreement in the last unrolled step; equal to agreement if there is one step


def check_rows(packing: Packing) -> None:
    """Raises ValueError if a batch's rows cannot be divided evenly over the devices of the current mesh."""
    shares = row_groups()
    for slots in packing.slots:
        rows = packing.tokens // slots
        if rows % shares:
            fits = math.lcm(*(length * shares for length in packing.slots))
            raise ValueError(
                f"a batch of {rows} rows of {slots} tokens cannot be shared by {DATA}={shares}: set packing.tokens to "
                f"{-(-packing.tokens // fits) * fits}"
            )


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
    """The state before the first step, replicated on every device."""
    average = jax.tree.map(jnp.array, params) if schedule.ema else None
    return everywhere(TrainState(jnp.zeros((), jnp.int32), params, optimiser(schedule).init(params), average))


def stack(config: Any, dtype: Any) -> Decoder:
    """The trained stack of layers. Raises ValueError for families without a stack of `models/decoder_only.py`."""
    module = family_of(config)
    if not hasattr(module, "FAMILY"):
        raise ValueError(f"{module.__name__} cannot be trained: it is no stack of models/decoder_only.py with a FAMILY")
    return Decoder(module.FAMILY, config, dtype)


def build_step(
    config: Any,
    schedule: Schedule,
    loss: Loss,
    *,
    dtype: Any = jnp.bfloat16,
    chunk: int = 512,
    unroll: Unroll = Unroll(),  # noqa: B008 - frozen
    target: LanguageModel | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted training step `(state, batch, target_params=None) -> (state, metrics)`, compiled once per row length.

    Master weights are float32, products use `dtype`. `unroll` is for drafters that read their target. With a `target`
    the labels of a batch, and the hidden states that the drafter reads, are computed in the step: they need not be
    stored, and the labels are whole distributions. On a mesh the rows of a batch are sharded over `data` (and the first
    ones of each device are unrolled further).
    """
    objective = _objective(config, loss, dtype, chunk, unroll, target)
    update, rate = optimiser(schedule), schedule.rate_at()
    gradient_of = over_rows(jax.value_and_grad(objective, has_aux=True), False, BY_ROW, False)

    def step(state: TrainState, batch: Batch, target_params: Params = None) -> tuple[TrainState, Metrics]:
        if (target is None) != (target_params is None):
            raise ValueError("a step with a target needs its target_params, and one without takes none")
        (value, (sums, *later)), gradient = gradient_of(state.params, batch, target_params)
        last = later[-1] if later else sums
        updates, inner = update.update(gradient, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            average = optax.incremental_update(params, average, 1.0 - schedule.ema)
        weight = jnp.maximum(sums.weight, 1e-6)
        means = (sums.agreement / weight, sums.acceptance / weight, sums.surprise / weight)
        now = jnp.asarray(rate(state.step // schedule.accumulate), jnp.float32)
        agreement = last.agreement / jnp.maximum(last.weight, 1e-6)
        metrics = Metrics(value, *means, optax.global_norm(gradient), now, sums.weight, agreement)
        return TrainState(state.step + 1, params, inner, average), metrics

    return jax.jit(step, donate_argnums=(0,))


def _objective(
    config: Any, loss: Loss, dtype: Any, chunk: int, unroll: Unroll, target: LanguageModel | None
) -> Callable[..., tuple[Array, tuple[Sums, ...]]]:
    """(mean loss, sums of each unrolled step); on a mesh the contributions of a device's rows."""
    axis = None if mesh_here() is None else DATA
    head_loss = build_head_loss(loss, chunk=chunk, dtype=dtype, axis=axis, cap=config.logit_cap)
    head = "embedding" if config.tie_word_embeddings else "head"
    if isinstance(config, LlamaReadingConfig):
        return _reading_objective(config, head_loss, head, dtype, unroll, _teacher(target, config.target_layers))
    model, teach = stack(config, dtype), _teacher(target, ())

    def objective(params: Params, batch: Batch, target_params: Params) -> tuple[Array, tuple[Sums, ...]]:
        labels, _ = teach(target_params, batch)
        hidden, _ = model.apply(
            {"params": params}, batch.tokens, None, batch.positions, _same_segment(batch), head=False
        )
        hidden = hidden.reshape(-1, hidden.shape[-1])
        value, sums = head_loss(hidden, params[head][batch.candidates], batch.correction, labels)
        return value, (sums,)

    return objective


def _same_segment(batch: Batch) -> Array:
    """[R, T, T] bool: whether two positions belong to one conversation."""
    return batch.segments[:, :, None] == batch.segments[:, None, :]


def _teacher(target: LanguageModel | None, layers: tuple[int, ...]) -> Callable[..., tuple[Labels, Any]]:
    """`(target_params, batch) -> (labels, hidden [R, T, F, D] of the position before)`: stored, or of the target."""
    if target is None:
        return lambda _, batch: (Labels(batch.weight, batch.following, batch.top, batch.log_prob), batch.hidden)
    check_layers(target, layers)
    apply, init_cache = with_hidden(target, layers), target.init_cache

    def teach(target_params: Params, batch: Batch) -> tuple[Labels, Array]:
        cache = init_cache(target_params, *batch.tokens.shape)
        logits, hidden, _ = apply(target_params, batch.tokens, cache, batch.positions, _same_segment(batch))
        labels = Labels(batch.weight, batch.following, None, logits.reshape(-1, logits.shape[-1]))
        return labels, jnp.pad(hidden, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]

    return teach


def _reading_objective(
    config: LlamaReadingConfig,
    head_loss: Callable[..., Any],
    head: str,
    dtype: Any,
    unroll: Unroll,
    teach: Callable[..., tuple[Labels, Any]],
) -> Callable[..., tuple[Array, tuple[Sums, ...]]]:
    """The mean over unrolled steps, each with `FADE` times the weight of the previous one."""
    family: Any = family_of(config)
    fading = FADE ** np.arange(unroll.steps)
    shares = fading / fading.sum()

    def objective(params: Params, batch: Batch, target_params: Params) -> tuple[Array, tuple[Sums, ...]]:
        whole, states = teach(target_params, batch)
        texts = Texts(batch.tokens, batch.positions, batch.segments, states)
        rows = family.head_rows(params, params[head][batch.candidates], batch.candidates)
        value, all_sums = jnp.zeros((), jnp.float32), []
        for step, hidden in enumerate(unrolled(config, params, texts, unroll, dtype)):
            weight = jnp.where(batch.positions.reshape(-1) >= step, batch.weight, 0.0)
            labels = whole._replace(weight=weight)
            labels = jax.tree.map(lambda leaf, size=hidden.shape[0] * hidden.shape[1]: leaf[:size], labels)
            flat = hidden.reshape(-1, hidden.shape[-1])
            step_loss, sums = head_loss(flat, rows, batch.correction, labels)
            value += jnp.float32(shares[step]) * step_loss
            all_sums.append(sums)
        return value, tuple(all_sums)

    return objective


def build_validation(
    config: Any,
    loss: Loss,
    *,
    dtype: Any = jnp.bfloat16,
    chunk: int = 512,
    unroll: Unroll = Unroll(),  # noqa: B008 - frozen
    target: LanguageModel | None = None,
) -> Callable[..., tuple[Sums, ...]]:
    """`(params, batch, target_params=None) -> sums of each unrolled step`: a step's metrics alone."""
    objective = _objective(config, loss, dtype, chunk, unroll, target)

    def sums(params: Params, batch: Batch, target_params: Params = None) -> tuple[Sums, ...]:
        return objective(params, batch, target_params)[1]

    return jax.jit(over_rows(sums, False, BY_ROW, False))


def judged_params(state: TrainState) -> Params:
    """The parameters that are evaluated and exported: the average, if there is one."""
    return state.params if state.average is None else state.average
