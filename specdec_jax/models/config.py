"""The base of the configs of all families: reading and writing config.json."""

import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from specdec_jax.models.layers import ACTIVATIONS
from specdec_jax.models.rope import check_scaling, rope_from_hf, rope_to_hf

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as in Hugging Face's `layer_types`. Kinds that a family adds begin with one of them."""
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class HFConfig:
    """Fields named as in Hugging Face's config.json, except for those that `renamed` maps to its names.

    A family's class has the defaults. Raises ValueError for invalid values.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    required: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    _: KW_ONLY
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    # Further attributes that the stack reads; families override them.
    num_key_value_heads: ClassVar[Any]
    head_dim: ClassVar[Any]
    sliding_window: ClassVar[Any] = None
    logit_cap: ClassVar[Any] = None  # `layers.soft_cap`

    def __post_init__(self):
        self.check_positive(*HFConfig.required, "num_key_value_heads", "head_dim", "max_position_embeddings")
        if self.hidden_act not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"{self.key('hidden_act')} must be one of {names}, got {self.hidden_act!r}")
        for token in self.eos_token_ids:
            if not (is_number(token, numbers.Integral) and 0 <= token < self.vocab_size):
                raise ValueError(f"eos_token_id must be tokens, 0 to {self.vocab_size - 1}, got {token!r}")

    embedding_width = property(lambda self: self.hidden_size)  # of embeddings and of the head's inputs
    context = property(lambda self: self.max_position_embeddings)  # maximum number of tokens of a text

    def check_positive(self, *names: str) -> None:
        """Raises ValueError for the first of these fields that is no positive integer, or a number above 10,000."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.key(name)} must be a positive integer, got {value!r}")
            if name.startswith("num_") and value > 10_000:  # layers, heads, experts: each has entries in tables
                raise ValueError(f"{self.key(name)} must be at most 10000, got {value}")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: FULL or SLIDING, to which a family may append a suffix."""
        return (FULL,) * self.num_hidden_layers

    @classmethod
    def key(cls, name: str) -> str:
        """A field's name in config.json."""
        return cls.renamed.get(name, name)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Reads config.json as written by transformers 4 or 5.

        Raises ValueError for another model_type, a missing number, a value of the wrong type, and values that the class
        does not support.
        """
        kind = config.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(f"models/{cls.model_type}.py serves model_type {cls.model_type!r}, got {kind!r}")
        keys = {each.name: cls.key(each.name) for each in fields(cls)}
        values = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
        for name, value in values.items():
            hint = _hints(cls)[name]
            if not _fits(value, hint):
                options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
                kinds = (WORDS[get_origin(option) or option] for option in options if option is not NoneType)
                raise ValueError(f"{keys[name]} must be {' or '.join(kinds)}, got {value!r}")
        eos = config.get("eos_token_id")
        values["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        try:
            values = cls.read_fields(config, values)
            missing = [cls.key(name) for name in cls.required if values.get(name) is None]
            if missing:
                raise ValueError(f"the model's config lacks {', '.join(missing)}")
            return cls(**values)
        except (TypeError, AttributeError, ArithmeticError, LookupError) as error:  # from an entry that is not a field
            raise ValueError(f"an entry of the model's config has the wrong type: {error}") from error

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The fields of this family, from those that config.json has by name."""
        return values

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both read; `from_hf` inverts it."""
        names = [each.name for each in fields(self) if each.name != "eos_token_ids"]
        ends = self.eos_token_ids
        return {self.key(name): getattr(self, name) for name in names} | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        }


def is_number(value: Any, kind: Any = numbers.Real) -> bool:
    """Whether the value is a finite number, also of numpy, and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)  # type: ignore[arg-type]


_hints = functools.cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of config.json has a field's type; lists are accepted for tuples."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(entry, inner[0]) for entry in value)
    if origin in (int, float):
        return is_number(value, numbers.Integral if origin is int else numbers.Real)
    return isinstance(value, Mapping if origin is dict else origin) if origin in WORDS or origin is NoneType else True


@dataclass(frozen=True)
class RopeConfig(HFConfig):
    """The config of a family with rotary positions."""

    _: KW_ONLY
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # with `rope_type`; None: plain rotary

    partial_rotary_factor: ClassVar[Any] = 1.0  # fraction of a head's width
    rotates_parts: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.rotated < 2 or self.rotated % 2 or self.rotated > self.head_dim:
            part = f"{self.partial_rotary_factor!r} of heads" if self.rotates_parts else "head_dim"
            raise ValueError(f"rotary positions need an even width of a head, got {part} {self.head_dim}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be above 0, got {self.rope_theta!r}")
        check_scaling(self.rope_scaling)

    # number of dimensions of a head with rotary positions
    rotated = property(lambda self: int(self.head_dim * self.partial_rotary_factor))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Reads both formats: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (5)."""
        rope, part = rope_from_hf(config, cls.rope_theta)
        if cls.rotates_parts:
            return values | rope | ({} if part is None else {"partial_rotary_factor": float(part)})
        if part not in (None, 1, 1.0):
            raise ValueError(f"models/{cls.model_type}.py rotates whole heads, got partial_rotary_factor {part!r}")
        return values | rope

    def to_hf(self) -> dict[str, Any]:
        part = {"partial_rotary_factor": self.partial_rotary_factor} if self.rotates_parts else {}
        return super().to_hf() | {"rope_parameters": rope_to_hf(self.rope_theta, self.rope_scaling) | part}
