"""Which module of `models/` serves a `model_type`: the one of that name, so a fork's file needs no registering."""

import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any

from specdec_jax import models
from specdec_jax.loading.suggest import listed, nearest

NEEDED = ("language_model", "parameter_table", "params_from_named", "named_from_params", "init_params")


def family(model_type: Any) -> ModuleType:
    """`specdec_jax.models.<model_type>`. Raises ValueError naming the type and those there are."""
    name = str(model_type).replace("-", "_")
    if name.isidentifier() and importlib.util.find_spec(f"{models.__name__}.{name}"):
        module = importlib.import_module(f"{models.__name__}.{name}")
        if _is_family(module):
            return module
    names = _families()
    raise ValueError(
        f"unknown model_type {model_type!r}{nearest(name, names)}; there are {listed(names)}. docs/extending.md shows "
        "how to add one, in one file"
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


def family_of(config: Any) -> ModuleType:
    """The module that defines a config's class."""
    return importlib.import_module(type(config).__module__)


def _is_family(module: ModuleType) -> bool:
    return all(hasattr(module, name) for name in NEEDED)


def _families() -> list[str]:
    names = [info.name for info in pkgutil.iter_modules(models.__path__)]
    return [name for name in names if _is_family(importlib.import_module(f"{models.__name__}.{name}"))]
