"""The module of a `model_type` is the file of that name; there is no registry."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from specdec_jax.strategy import nearest

CONTRIB = "specdec_jax.contrib.encoder", "specdec_jax.contrib.block"
FOLDERS = "specdec_jax.models", "specdec_jax.drafters.draft_models", *CONTRIB
"""The packages that are searched; those of contrib are imported on lookup."""
NEEDED = ("language_model", "parameter_table", "params_from_named", "named_from_params", "init_params")


def family(model_type: Any) -> ModuleType:
    """The file `<model_type>` of these packages. Raises ValueError naming the type and the supported ones."""
    name = str(model_type).replace("-", "_")
    files = [f"{folder}.{name}" for folder in FOLDERS] if name.isidentifier() else []
    module = next((importlib.import_module(file) for file in files if importlib.util.find_spec(file)), None)
    if module is not None and _is_family(module):
        return module
    names = family_names()
    raise ValueError(
        f"unknown model_type {model_type!r}{nearest(name, names)}. docs/extending.md shows how to add one, in one file"
    )


def config_class(module: ModuleType) -> Any:
    """The one class a family defines with a `from_hf`."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "from_hf")
    ]
    if len(classes) != 1:
        raise ValueError(f"{module.__name__} must define one config class with from_hf, it has {len(classes)}")
    return classes[0]


def config_of(where: Any, model_type: Any, fields: Mapping[str, Any]) -> Any:
    """The fields of a config.json as the family's config. Raises ValueError naming `where` they are from."""
    try:
        return config_class(family(model_type)).from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def family_of(config: Any) -> ModuleType:
    """The module that defines a config's class."""
    return importlib.import_module(type(config).__module__)


def _is_family(module: ModuleType) -> bool:
    return all(hasattr(module, name) for name in NEEDED)


def family_names() -> list[str]:
    """All supported model_types."""
    paths = [(folder, importlib.import_module(folder).__path__) for folder in FOLDERS]
    files = [f"{folder}.{info.name}" for folder, path in paths for info in pkgutil.iter_modules(path)]
    return sorted(name.rpartition(".")[2] for name in files if _is_family(importlib.import_module(name)))
