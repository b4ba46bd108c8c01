"""A GGUF file's hyper-parameters by name, whatever its architecture."""

from typing import Any

import numpy as np

from specdec_jax.loading.gguf.reader import GGUF


def architecture_name(file: GGUF) -> str:
    """What the file says it is; its hyper-parameters are named behind it."""
    return str(file.metadata.get("general.architecture"))


def number(file: GGUF, name: str, default: Any = None) -> Any:
    """A hyper-parameter, without the architecture before its name.

    Raises ValueError naming the file when it is missing and has no default, or differs between layers.
    """
    key = f"{architecture_name(file)}.{name}"
    value = file.metadata.get(key, default)
    if value is None:
        raise ValueError(f"{file.path} lacks the hyper-parameter {key}")
    if isinstance(value, np.ndarray):  # one number a layer
        if len(set(value.tolist())) != 1:
            raise ValueError(f"{file.path}: {key} differs between layers, which is not served")
        return value.tolist()[0]
    return value


def exact(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
