"""The virtual pool at run time: which storage lies where now, and how high any has lain. It searches for nothing.

    pool = Pool(program.tensors, plan.persistent, backend.view)
    pool.alloc("conv1", 4096, 1 << 20)
    y = pool.view("relu1")

Places come from the plan; the pool only keeps them and hands out views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vdnn.errors import PlanError
from vdnn.layers.tensor import TensorSpec

ViewMaker = Callable[[TensorSpec, TensorSpec, int], Any]


class Pool:
    """Places of the storages of one program.

    Args:
        tensors: of the program.
        persistent: offset of every persistent storage.
        make_view: a backend's `view`.

    Attributes:
        top_bytes: end of the highest storage so far: so much of the slab was used, gaps included.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], persistent: Mapping[str, int], make_view: ViewMaker):
        self._tensors, self._make_view = tensors, make_view
        self._places: dict[str, tuple[int, int]] = {
            name: (offset, tensors[name].nbytes) for name, offset in persistent.items() if name in tensors
        }
        self._views: dict[tuple[str, int], Any] = {}
        self.top_bytes = max((offset + nbytes for offset, nbytes in self._places.values()), default=0)

    def alloc(self, storage: str, offset: int, nbytes: int) -> None:
        """`storage` now lies at [offset, offset + nbytes)."""
        if storage in self._places:
            raise PlanError(f"storage '{storage}' is allocated twice")
        self._places[storage] = (offset, nbytes)
        self.top_bytes = max(self.top_bytes, offset + nbytes)

    def free(self, storage: str) -> tuple[int, int]:
        """`storage` lies nowhere any more; returns the (offset, nbytes) it had."""
        place = self.place(storage)
        del self._places[storage]
        return place

    def place(self, storage: str) -> tuple[int, int]:
        """(offset, nbytes) of a storage that is on the device."""
        try:
            return self._places[storage]
        except KeyError:
            raise PlanError(f"storage '{storage}' is used while it is not on the device") from None

    def view(self, tensor: str) -> Any:
        """The backend's array of `tensor` where its storage lies now."""
        spec = self._tensors[tensor]
        offset = self.place(spec.storage)[0]
        key = (tensor, offset)
        if key not in self._views:
            self._views[key] = self._make_view(spec, self._tensors[spec.storage], offset)
        return self._views[key]
