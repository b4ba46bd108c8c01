"""Draft vocabularies: `smollm2-drafter@8192` proposes only the 8,192 most frequent tokens, and reads only their rows.

The ranking is a file next to the drafter's weights, token ids in a numpy array, the most frequent first; `@FILE.npy`
uses all tokens of another file. `python -m experiments.distill rank_tokens` creates it. Source: FR-Spec
(arXiv 2502.14856).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.loading.builtin import BUILTIN

RANKING = "token_ranking.npy"
TOKENS, TEXT = WAYS = "tokens", "text"  # to draft for a target with another vocabulary (loading/across.py)


def split_source(source: str) -> tuple[str, str]:
    """A model's source without and with its suffix after the last @: a draft vocabulary or one of `WAYS`, or empty.

    Existing paths are not split. Raises ValueError: a model with another suffix.
    """
    base, _, vocabulary = source.rpartition("@")
    if not base or Path(source).expanduser().exists():
        return source, ""
    if vocabulary.isdecimal() or vocabulary.endswith(".npy") or vocabulary in WAYS:
        return base, vocabulary
    if base in BUILTIN or Path(base).expanduser().exists():
        raise ValueError(
            "after @ comes a number of tokens or a .npy file of them, or tokens or text (how it drafts for a target "
            f"with another vocabulary), or the revision of a hub id, got {source!r}"
        )
    return source, ""


def with_draft_vocabulary(loaded: Any, tokens: Sequence[int] | np.ndarray) -> Any:
    """The same `LoadedModel`, a drafter that proposes only these tokens.

    Raises ValueError: as `reduce_params`, or a model whose family does not expose its head.
    """
    try:
        model, params = with_reduced_head(loaded.model), reduce_params(loaded.model, loaded.params, tokens)
        return loaded._replace(model=model, params=params)
    except ValueError as error:
        raise ValueError(f"{loaded.name}: {error}") from None


def read_tokens(vocabulary: str, weights: Path) -> np.ndarray:
    """The tokens for `@8192` or `@FILE.npy` and a model whose weights are at `weights`, a file or folder.

    Raises FileNotFoundError: no such file, or no ranking next to the weights; or ValueError: not an array of token ids,
    or a ranking of fewer tokens.
    """
    if not vocabulary.isdecimal():
        return _array(Path(vocabulary).expanduser())
    path = (weights if weights.is_dir() else weights.parent) / RANKING
    if not path.is_file():
        raise FileNotFoundError(
            f"@{vocabulary} needs a ranking of tokens at {path}; python -m experiments.distill rank_tokens writes "
            "one, and @FILE.npy takes it from elsewhere (a revision that is a number is given by its commit)"
        )
    ranked, wanted = _array(path), int(vocabulary)
    if not 1 <= wanted <= len(ranked):
        raise ValueError(f"@{wanted} is outside 1 to {len(ranked)}, the tokens ranked in {path}")
    return ranked[:wanted]


def _array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"no draft vocabulary at {path}; python -m experiments.distill rank_tokens writes one")
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is no numpy array: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{path} must hold a list of token ids")
    return tokens
