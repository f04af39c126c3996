"""What a tensor is before it has bytes: name, role, logical shape, dtype, layout, and whose bytes it shares.

x = TensorSpec("conv1", "act", (64, 96, 55, 55))                      # N, C, H, W
y = TensorSpec("relu1", "act", x.shape, view_of="conv1")             # in place: the same bytes
b = TensorSpec("b1", "act", (64, 32, 28, 28), view_of="cat", channel=64)  # channels 64..95 of "cat"
h = TensorSpec("conv1[32:64]", "act", (32, 96, 55, 55), view_of="conv1", image=32, slice_of="conv1")  # half a batch
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]

IMAGES, LABELS = "images", "labels"
"""Tensors of a Program that the host writes before every run."""
ROLES = ("input", "label", "act", "grad", "weight", "wgrad", "state", "loss", "aux")
MEMORY_ORDERS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
"""Layout → the dimensions (N, C, H, W), or (K, C, R, S) of filters, from the farthest apart in memory to neighbours."""
DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int32": 4}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named value. It holds no array, no address and no device.

    Args:
        name: unique in its Program.
        role: one of ROLES; decides the category it is counted in.
        shape: logical shape, (N, C, H, W) for images, (N, C) after flatten, (K, C/groups, R, S) for filters.
        dtype: a key of DTYPE_BYTES.
        layout: order of four dimensions in memory, a key of MEMORY_ORDERS; fewer lie in the order of the shape.
        view_of: the tensor whose bytes this one shares; None if it has its own. Never itself a view.
        channel: first channel of `view_of` that this view covers.
        image: first image of `view_of` that this view covers.
        slice_of: the tensor of which this view is some images, and whose value it therefore holds; None if it is whole.
    """

    name: str
    role: str
    shape: Shape
    dtype: str = "float32"
    layout: str = "NCHW"
    view_of: str | None = None
    channel: int = 0
    image: int = 0
    slice_of: str | None = None

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
        if self.layout not in MEMORY_ORDERS:
            raise ValueError(f"tensor '{self.name}': unknown layout '{self.layout}'")


def element_strides(spec: TensorSpec, root: TensorSpec) -> Shape:
    """Elements between neighbours of each dimension of `spec` in its storage `root`, in the layout of `spec`.

    Channels of an NHWC storage are no block of it: every pixel holds all channels of the storage. Nor are images of a
    CHWN storage: every number of an image lies beside those of the other images.
    """
    part = spec.nbytes != root.nbytes
    sizes = root.shape if part and len(root.shape) == len(spec.shape) else spec.shape
    order = MEMORY_ORDERS[spec.layout] if len(sizes) == 4 else tuple(range(len(sizes)))
    strides, step = [1] * len(sizes), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    if part:
        strides[0] = element_strides(root, root)[0]
    return tuple(strides)


def first_element(spec: TensorSpec, root: TensorSpec) -> int:
    """Elements of `root` before the first one of `spec`."""
    places = zip((spec.image, spec.channel), element_strides(root, root), strict=False)
    return sum(index * stride for index, stride in places)


def extent(spec: TensorSpec, root: TensorSpec) -> tuple[range, range]:
    """Images and channels of `root` that `spec` covers: all of them if it has as many bytes, whatever its shape."""
    images, channels = (range(size) for size in (*root.shape, 1, 1)[:2])
    if spec.nbytes == root.nbytes:
        return images, channels
    if prod(spec.shape[1:]) != prod(root.shape[1:]):
        channels = range(spec.channel, spec.channel + spec.shape[1])
    return range(spec.image, spec.image + spec.shape[0]), channels
