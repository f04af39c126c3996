"""What a backend's slab holds of values fed ahead, so that no run computes on another run's images.

    if not backend.held.has("images", offset, images): ...      # upload them before the run
    backend.held.note("images", offset, following)              # after it

There is one per backend, for all executors. Whether the slab holds a value is told by the value's own memory: the same
address, shape and strides, while nobody can write there. So an array that can be written counts as unknown, and is fed
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy import ndarray
from numpy.typing import NDArray


class Held:
    """Values by tensor name, each with the slab offset at which it lies."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, NDArray[Any]]] = {}

    def has(self, name: str, offset: int, value: NDArray[Any]) -> bool:
        """Whether the bytes of tensor `name` at `offset` hold `value`."""
        place, held = self._values.get(name, (-1, None))
        return held is not None and place == offset and _memory(held) == _memory(value)

    def note(self, name: str, offset: int, value: NDArray[Any]) -> None:
        """They hold `value` now. Its memory is kept, so that no other array can come to lie there."""
        self._values.pop(name, None)
        if is_frozen(value):
            self._values[name] = (offset, value)

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is known of `names` any more."""
        for name in names:
            self._values.pop(name, None)

    def keep(self, places: Mapping[str, int]) -> None:
        """A plan runs that sets these offsets aside: forget what lies anywhere else, where it may be overwritten."""
        self.forget([name for name, (offset, _) in self._values.items() if places.get(name) != offset])


def is_frozen(value: NDArray[Any]) -> bool:
    """Whether no array can write the memory of `value`: neither it nor what it is a view of."""
    owner: Any = value
    while isinstance(owner, ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None or isinstance(owner, bytes)


def _memory(value: NDArray[Any]) -> tuple[Any, ...]:
    return value.ctypes.data, value.shape, value.strides, value.dtype
