"""Placeholders for values that a trace does not have, which raise an error when a policy reads them."""

from typing import Any

import jax


@jax.tree_util.register_static
class Unrecorded:
    """A placeholder that raises an error when anything but its shape is read.

    Raises:
        ValueError: "this rule reads ..., which a trace does not hold", from every operation, indexing or jnp function.
    """

    def __init__(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        self._name, self._shape = name, shape

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise ValueError(f"this rule reads {self._name}, which a trace does not hold: it cannot be replayed")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in a live run, if it is known."""
        return self._refuse() if self._shape is None else self._shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # attributes that Python and jax look up in any object
            raise AttributeError(name)
        self._refuse()

    def __hash__(self) -> int:
        return hash((self._name, self._shape))

    def __eq__(self, other: object) -> bool:  # jax compares static parts of its arguments
        return (
            (self._name, self._shape) == (other._what, other._shape)
            if isinstance(other, Unrecorded)
            else self._refuse()
        )

    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = __bool__ = __index__ = __float__ = _refuse
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = __pos__ = __abs__ = _refuse
