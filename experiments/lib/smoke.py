"""What `--smoke` runs on, so that an experiment works in seconds and without any file: made-up traces and tiny models.

Nothing measured on them means anything. A made-up trace has what rules live on: entropies that tell something about
acceptance, hits that come in runs, and tasks that differ.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from specdec_jax.loading import LoadedModel
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.models import llama
from specdec_jax.replay.chains import CANDIDATES
from specdec_jax.replay.trace import FEATURES, Trace

TASKS = {"code": 0.85, "mathematics": 0.75, "chat": 0.5}  # how likely a text's easy stretches are
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def made_up_trace(
    temperature: float = 0.0, texts: int = 12, tokens: int = 48, longest: int = 16, seed: int = 0, boost: float = 0.0
) -> Trace:
    """A consistent trace of no models; `boost` lowers its entropies, as a better drafter would."""
    rng = np.random.default_rng([seed, round(100 * temperature)])
    tasks = [list(TASKS)[index % len(TASKS)] for index in range(texts)]
    length = rng.integers(tokens // 2, tokens + 1, texts).astype(np.int32)
    at = np.arange(tokens + 1)
    easy = np.zeros((texts, tokens + 1), bool)
    for text, task in enumerate(tasks):
        change = rng.uniform(size=tokens + 1) < 0.2
        stretch = rng.uniform(size=tokens + 1) < TASKS[task]
        easy[text] = stretch[np.maximum.accumulate(np.where(change, at, 0))]
    entropy = rng.gamma(1.0, np.where(easy, 0.3, 2.0)) * (1 + temperature / 2) * np.exp(-boost)
    overlap = np.clip(1 - np.sqrt(0.2 * entropy), 0.02, 1.0)
    within = at[None, :] <= length[:, None]
    accepted = (rng.uniform(size=overlap.shape) < overlap) & (at[None, :] < length[:, None])
    rejected = within & ~accepted
    tail_of = np.where(rejected, np.cumsum(rejected).reshape(rejected.shape) - 1, 0)
    path = np.where(within[..., None], _features(entropy), 0.0)
    tails = _features(rng.gamma(1.0, 1.5, (int(rejected.sum()), longest)))
    tails[:, 0] = path[rejected]
    missed = ~accepted & (at[None, :] < length[:, None])
    candidate = np.where(missed, rng.choice(CANDIDATES, missed.shape, p=(0.5, 0.3, 0.15, 0.05)), 0)
    unknown = lambda values: np.where(within, values, np.nan).astype(np.float32)  # noqa: E731
    return Trace(
        path=path.astype(np.float32),
        accepted=accepted,
        tail_of=tail_of.astype(np.int32),
        tails=tails.astype(np.float32),
        length=length,
        limit=np.full(texts, tokens, np.int32),
        prompt_length=np.full(texts, 8, np.int32),
        seed=np.arange(texts, dtype=np.uint32),
        temperature=np.full(texts, temperature, np.float32),
        tokens=rng.integers(0, 100, (texts, tokens)).astype(np.int32),
        overlap=unknown(overlap),
        cross_entropy=unknown(1.2 * entropy),
        target_entropy=unknown(entropy),
        raw_target_entropy=unknown(entropy),
        about={"ids": [f"{task}-{index}" for index, task in enumerate(tasks)], "tasks": tasks, "target": "made up"},
        candidate=candidate.astype(np.int8),
        truncation=np.tile(np.float32([0.0, 1.0, 0.0]), (texts, 1)),
    )


def made_up_traces(boost: float = 0.0) -> dict[float, Trace]:
    """Two temperatures, as `load_traces` gives them."""
    return {temperature: made_up_trace(temperature, boost=boost) for temperature in (0.0, 1.0)}


def _features(entropy: np.ndarray) -> np.ndarray:
    """Statistics [..., F] of distributions with these entropies."""
    max_prob = np.exp(-0.7 * entropy)
    columns = {"entropy": entropy, "raw_entropy": entropy, "max_prob": max_prob, "raw_max_prob": max_prob}
    columns |= {"margin": max_prob / 2, "log_q": np.log(max_prob)}
    return np.stack([columns[name] for name in FEATURES], axis=-1)


@functools.cache
def tiny_pair() -> tuple[LoadedModel, LoadedModel]:
    """A random target of two layers and a random drafter of one in float32, which spell in bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {}, chat_template=TEMPLATE)
    pair = []
    for layers, name in ((2, "tiny target"), (1, "tiny drafter")):
        config = llama.LlamaConfig(len(letters), 32, 48, layers, 2, 2, 16, max_position_embeddings=1024)
        params = llama.init_params(config, jax.random.key(layers), jnp.float32)
        pair.append(LoadedModel(llama.language_model(config, jnp.float32), params, tokenizer, name, config))
    return pair[0], pair[1]
