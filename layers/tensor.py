"""What a tensor is before it has bytes: name, role, logical shape, dtype, layout, and whose bytes it shares.

x = TensorSpec("conv1", "act", (64, 96, 55, 55))                      # N, C, H, W
y = TensorSpec("relu1", "act", x.shape, view_of="conv1")             # in place: the same bytes
b = TensorSpec("b1", "act", (64, 32, 28, 28), view_of="cat", channel=64)  # channels 64..95 of "cat"
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]

ROLES = ("input", "label", "act", "grad", "weight", "wgrad", "state", "loss", "aux")
DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int32": 4}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named value. It holds no array, no address and no device.

    Args:
        name: unique in its Program.
        role: one of ROLES; decides the category it is counted in.
        shape: logical shape, (N, C, H, W) for images, (N, C) after flatten, (K, C/groups, R, S) for filters.
        dtype: a key of DTYPE_BYTES.
        layout: order of the dimensions in memory, "NCHW", "CHWN" or "NHWC".
        view_of: the tensor whose bytes this one shares; None if it has its own. Never itself a view.
        channel: first channel of `view_of` that this view covers.
    """

    name: str
    role: str
    shape: Shape
    dtype: str = "float32"
    layout: str = "NCHW"
    view_of: str | None = None
    channel: int = 0

    @property
    def storage(self) -> str:
        """The name of the tensor that owns the bytes."""
        return self.view_of or self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of this tensor (of a view: of its part only)."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"tensor '{self.name}': unknown role '{self.role}', expected one of {', '.join(ROLES)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor '{self.name}': unknown dtype '{self.dtype}'")


def element_strides(spec: TensorSpec, root: TensorSpec) -> Shape:
    """Elements between neighbours of each dimension of `spec` in its storage `root`, both NCHW."""
    strides = [prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
    if spec.nbytes != root.nbytes:
        strides[0] = prod(root.shape[1:])
    return tuple(strides)


def first_element(spec: TensorSpec, root: TensorSpec) -> int:
    """Elements of `root` before the first one of `spec`."""
    return spec.channel * prod(root.shape[2:])
