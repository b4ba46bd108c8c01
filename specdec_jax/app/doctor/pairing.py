"""Who the two models are, and whether they can decode together; told without their weights (`loading.outline`)."""

from typing import Any

from specdec_jax.loading import LoadedModel, needs_translation
from specdec_jax.loading.across import said_of, way_for
from specdec_jax.loading.families import family_of
from specdec_jax.models.weights import num_weights
from specdec_jax.text.pair import check_pair


def facts(model: LoadedModel) -> dict[str, Any]:
    """By what the page calls them."""
    family = family_of(model.config)
    return {
        "source": model.name,
        "family": family.__name__.rpartition(".")[2],
        "parameters": num_weights(family.parameter_table(model.config)),
        "tokens known": model.tokenizer.vocab_size,
        "embeddings": model.model.spec.vocab_size,
        "context": model.model.spec.context,
    }


def refusal_of(target: LoadedModel, drafter: LoadedModel) -> str:
    """Why they cannot decode together, empty if they can."""
    try:
        check_pair(target, drafter)
    except ValueError as error:
        return str(error)
    return ""


def agreements(target: LoadedModel, drafter: LoadedModel) -> list[str]:
    """What lets two that can decode together do so, a sentence each."""
    said = [f"The vocabularies agree: {target.tokenizer.vocab_size:,} tokens."]
    if needs_translation(target, drafter):
        way = way_for(target, drafter)
        said = [f"The vocabularies differ: {said_of(way, target.tokenizer, drafter.tokenizer)}."]
    if drafter.model.reading is not None:
        layers = ", ".join(map(str, drafter.model.reading.layers))
        said.append(f"The drafter reads the target's hidden states of layers {layers}.")
    return said
