"""Programs of a pair of models from shapes alone: no weights are loaded; compiled as for a generation.

`CHIPS` are the accelerators, with what is publicly known of them and their topologies.

A TPU's clock is not published. Here it is the public peak of bfloat16 products over the operations a cycle that the
compiler itself estimates for a large product (131,072 on v5e, 262,144 on v5p, 524,288 on v6e, to within 4 to 13 %).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec_jax import stopping, verification
from specdec_jax.contrib.trees import survival_tree
from specdec_jax.decoding import Decoder, build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.state import fresh_state
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading.families import family_of
from specdec_jax.loading.load import SHARE_DRAFTER
from specdec_jax.meshes import weight_sharding
from specdec_jax.models import llama
from specdec_jax.models.weights import placed_shapes
from specdec_jax.sharding import DATA, caches_laid, sharding
from specdec_jax.types import LanguageModel

TARGETS = Path(__file__).resolve().parents[2] / "configs" / "chips"


@dataclass(frozen=True)
class Chip:
    """A kind of accelerator. Sources: Google Cloud's TPU pages; NVIDIA's data sheets (configs/chips/*.txtpb)."""

    name: str
    platform: str
    """tpu or cuda."""
    topologies: dict[int, str]
    """Slices that the compiler takes, by how many chips they have; a program is compiled for the first of them."""
    bandwidth: float
    """Bandwidth of its memory, bytes a second."""
    memory: float
    """Bytes."""
    clock: float = 0.0
    """Hz, of a TPU's cycles."""

    @property
    def packages(self) -> str:
        """The requirements file whose environment compiles for it."""
        return "requirements-tpu.txt" if self.platform == "tpu" else "requirements-gpu.txt"

    def devices(self, count: int) -> list[Any]:
        """Those of the smallest slice with so many, for shardings of what is compiled. Needs that environment.

        Raises ValueError where no slice has as many.
        """
        from jax.experimental import topologies

        sizes = [size for size in sorted(self.topologies) if size >= count]
        if not sizes:
            raise ValueError(
                f"{count} chips of {self.name} are more than {max(self.topologies)}, the most that is served"
            )
        topology = self.topologies[sizes[0]]
        options: dict[str, Any] = {"topology_name": topology}
        if self.platform == "cuda":
            target = (TARGETS / f"{self.name}.txtpb").read_text(encoding="utf-8")
            options = {"target_config": target, "topology": topology}
        return list(topologies.get_topology_desc(platform=self.platform, **options).devices)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e", "tpu", {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}, 819e9, 16e9, 1.5e9),
        Chip("tpu-v5p", "tpu", {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, 2765e9, 95e9, 1.75e9),
        Chip("tpu-v6e", "tpu", {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"}, 1640e9, 32e9, 1.75e9),
        Chip("h100", "cuda", {1: "1x1x1", 8: "1x1x8"}, 3352e9, 85e9),
        Chip("b200", "cuda", {1: "1x1x1", 8: "1x1x8"}, 7672e9, 192e9),
    )
}


SMOLLM2 = llama.LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True)
SMALL_DRAFTER = llama.LlamaConfig(49152, 224, 640, 4, 4, 2, 56, max_position_embeddings=8192, tie_word_embeddings=True)
READING_DRAFTER = llama_reading.reading_config(SMALL_DRAFTER, (16, 22, 26), SMOLLM2.hidden_size)
LLAMA_1B = llama.LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, max_position_embeddings=8192, tie_word_embeddings=True)
LLAMA_8B = llama.LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=8192)
LLAMA_70B = llama.LlamaConfig(128256, 8192, 28672, 80, 64, 8, 128, max_position_embeddings=8192)


class Pair(NamedTuple):
    """Shapes of a target and a drafter."""

    target: llama.LlamaConfig
    drafter: llama.LlamaConfig
    draft_vocabulary: int | None = None
    int8: bool = False  # whether both models' matrices are int8 (models/int8.py)
    siblings: int = 0  # maximum number that `survival` verifies per draft


PAIRS = {
    "smollm2-reading": Pair(SMOLLM2, READING_DRAFTER, 8192),  # the built-in one as `generate` uses it
    "smollm2-combs": Pair(SMOLLM2, READING_DRAFTER, 8192, siblings=3),
    "smollm2": Pair(SMOLLM2, SMALL_DRAFTER, 8192),
    "smollm2-whole": Pair(SMOLLM2, SMALL_DRAFTER),
    "8b-1b": Pair(LLAMA_8B, LLAMA_1B),
    "70b-8b": Pair(LLAMA_70B, LLAMA_8B),
    "tiny": Pair(
        llama.LlamaConfig(49152, 576, 1536, 2, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True),
        llama.LlamaConfig(49152, 224, 640, 1, 4, 2, 56, max_position_embeddings=8192, tie_word_embeddings=True),
        8192,
    ),
}
PROGRAMS = ("prefill", "run", "step", "extend")


class Shapes(NamedTuple):
    """Arguments with which the programs of a pair are compiled."""

    decoder: Decoder
    params: ModelParams  # leaves are jax.ShapeDtypeStruct, as in all fields below
    request: Any
    state: Any


def shapes_of(pair: Pair, batch: int, slots: int, max_draft_length: int) -> Shapes:
    """The decoder of a pair with `survival` and token rejection in bfloat16, and the shapes of a generation of it."""
    target = llama.language_model(pair.target, jnp.bfloat16)
    drafter, drafter_params = _drafter(pair)
    decoder = build_decoder(
        target,
        drafter_of(drafter, max_draft_length),
        survival_tree(siblings=pair.siblings) if pair.siblings else stopping.survival(),
        verification.rejection(),
    )
    params = ModelParams(_weights(pair.target, pair.int8), drafter_params)
    request = fresh_state(decoder.parts, [[1, 2, 3]] * batch, max_new_tokens=slots // 4, slots=slots)
    reader = _reader(decoder, params)
    cache, reads = jax.eval_shape(decoder.jitted["prefill"], params.target, reader, request.tokens, request.length)
    drafted = jax.eval_shape(decoder.jitted["prefill_drafter"], params.drafter, request.tokens, request.length, reads)
    return Shapes(decoder, params, request, request._replace(target_cache=cache, drafter=drafted))


def _reader(decoder: Decoder, params: ModelParams) -> Any:
    """The drafter parameters passed to the target's prefill, for a drafter that reads its hidden states."""
    return None if not decoder.parts.drafter.layers else params.drafter


def placed(shapes: Shapes, pair: Pair, mesh: Mesh) -> Shapes:
    """The same on a mesh: chips share rows, the weights and heads of caches; a small drafter is whole on each."""

    def laid(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=place)

    def put(leaf: Any, *axes: Any) -> Any:
        return laid(leaf, sharding(mesh, np.shape(leaf), *axes))

    def weights(config: llama.LlamaConfig, tree: Any) -> Any:
        return placed_shapes(family_of(config).parameter_table(config), tree, lambda axes: weight_sharding(mesh, axes))

    def caches(tree: Any, shared: bool) -> Any:
        return jax.tree.map(laid, tree, caches_laid(mesh, tree, shared))

    shared, params, caches_of = is_shared(pair), shapes.params.drafter, shapes.state
    drafter = weights(pair.drafter, params) if shared else jax.tree.map(put, params)
    request, state = (jax.tree.map(lambda leaf: put(leaf, DATA), tree) for tree in (shapes.request, shapes.state))
    state = state._replace(target_cache=caches(caches_of.target_cache, True), drafter=caches(caches_of.drafter, shared))
    return Shapes(shapes.decoder, ModelParams(weights(pair.target, shapes.params.target), drafter), request, state)


def is_shared(pair: Pair) -> bool:
    """Whether chips share the drafter's weights, as `load_drafter` has it; those with a vocabulary are small here."""
    return pair.draft_vocabulary is None and bytes_of(_weights(pair.drafter, pair.int8)) >= SHARE_DRAFTER


def _drafter(pair: Pair) -> tuple[LanguageModel, Any]:
    model = family_of(pair.drafter).language_model(pair.drafter, jnp.bfloat16)
    params = _weights(pair.drafter, pair.int8)
    if pair.draft_vocabulary is None:
        return model, params
    tokens = np.arange(pair.draft_vocabulary)
    return with_reduced_head(model), jax.eval_shape(lambda tree: reduce_params(model, tree, tokens), params)


def _weights(config: llama.LlamaConfig, int8: bool) -> Any:
    family = family_of(config)
    shapes = jax.eval_shape(lambda key: family.init_params(config, key, jnp.bfloat16), jax.random.key(0))
    return placed_shapes(family.parameter_table(config), shapes, int8=int8)


def weights_read(pair: Pair, shares: int = 1) -> dict[str, int]:
    """Bytes of weights that a pass of either model reads: of an embedding-only table, single rows.

    `shares`: chips that share the target's, and a large drafter's.
    """
    return {
        "target": _read(pair.target, pair.target.vocab_size, pair.int8) // shares,
        "drafter": _read(pair.drafter, pair.draft_vocabulary or pair.drafter.vocab_size, pair.int8)
        // (shares if is_shared(pair) else 1),
    }


def _read(config: llama.LlamaConfig, rows: int, int8: bool) -> int:
    weights = dict(_weights(config, int8))
    embedding = bytes_of(weights.pop("embedding"))
    head = embedding * rows // config.vocab_size if config.tie_word_embeddings else 0
    return bytes_of(weights) + head


def bytes_of(tree: Any) -> int:
    """Bytes of all leaves of shapes."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program(name: str, shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function, arguments) of one of PROGRAMS."""
    decoder, params, request, state = shapes
    arguments: dict[str, tuple[Any, ...]] = {
        "prefill": (params.target, _reader(decoder, params), request.tokens, request.length),
        "run": (params, state, *2 * [jax.ShapeDtypeStruct((), jnp.int32)]),
        "step": (params, state),
        "extend": (params, state, request),
    }
    return decoder.jitted[name], arguments[name]
