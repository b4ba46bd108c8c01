"""The range of a number, declared once in the annotation of a parameter or field: `Annotated[float, Between(0, 1)]`.

`@strategy` reads the ranges of options and hyperparameters, `check_fields` those of a dataclass such as the options
of a command. The module imports nothing slow, because --help needs it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

INFINITY = float("inf")


class Between(NamedTuple):
    """The finite numbers from `low` to `high`."""

    low: float = -INFINITY
    high: float = INFINITY
    open: str = ""  # "low", "high" or "low, high": without these ends
    whole: bool = False  # whole numbers only; also where the annotated type has int and no float
    entries: int | None = None  # None: one number; n: n numbers; 0: one or more, also where the type is a tuple or list

    def contains(self, number: Any) -> Any:
        """Whether a number, or each of a numpy array, lies in the range."""
        above = number > self.low if "low" in self.open else number >= self.low
        below = number < self.high if "high" in self.open else number <= self.high
        return above & below & (abs(number) < INFINITY)

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError unless `value`, or each of its entries, is a number in the range."""
        numbers = value if self.entries is not None and isinstance(value, (list, tuple)) and len(value) else [value]
        kind = "__index__" if self.whole else "__float__"
        if any(isinstance(number, (bool, str)) or not hasattr(number, kind) for number in numbers):
            raise self.error(name, value, is_number=False)
        if not all(self.contains(number) for number in numbers):
            raise self.error(name, value)

    def error(self, name: str, value: Any, is_number: bool = True) -> ValueError:
        """The error for a `value` of `name` that is outside the range, or no number."""
        low, high = (f"{end:g}" if abs(end) < 1e6 else f"{end:.0f}" for end in (self.low, self.high))
        left = "(" if "low" in self.open or self.low == -INFINITY else "["
        right = ")" if "high" in self.open or self.high == INFINITY else "]"
        must = f"lie in {left}{low}, {high}{right}" if is_number else f"be a {'whole ' if self.whole else ''}number"
        return ValueError(f"{name} must {must}, got {shortened(value)}")


# Frequent hyperparameters. Their type is Any: `init` gets them as arrays.
Share = Annotated[Any, Between(0, 1)]
Positive = Annotated[Any, Between(0, open="low")]
NotNegative = Annotated[Any, Between(0)]
Count = Annotated[Any, Between(0, whole=True)]  # int32
Length = Annotated[Any, Between(1, whole=True)]  # int32
DraftLength = Annotated[int, Between(1)]  # the option of drafters


@functools.lru_cache(maxsize=256)
def ranges_of(declaring: Callable[..., Any]) -> dict[str, Between]:
    """The declared ranges of a function's parameters or a dataclass's fields, by name."""
    try:
        parameters = inspect.signature(declaring, eval_str=True).parameters
    except Exception:  # annotations that are text, of what only type checkers import or of no Python at all
        parameters = inspect.signature(declaring).parameters
    ranges = {}
    for name, parameter in parameters.items():
        for declared in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(declared, Between):
                types = _types(parameter.annotation.__origin__)
                whole = declared.whole or (int in types and float not in types)
                several = 0 if declared.entries is None and types & {tuple, list, Sequence} else declared.entries
                ranges[name] = declared._replace(whole=whole, entries=several)
    return ranges


def check_fields(record: Any) -> None:
    """Raises ValueError for the first field of a dataclass outside its declared range; a default may be outside."""
    for name, within in ranges_of(type(record)).items():
        if (value := getattr(record, name)) is not getattr(type(record), name, None):
            within.check(name, value)


def shortened(value: Any) -> str:
    """The text of a value in a message, at most 60 characters."""
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def _types(hint: Any) -> set[Any]:
    return {hint, get_origin(hint)}.union(*map(_types, get_args(hint)))
