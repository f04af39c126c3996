"""From a Graph to a Program: forward, backward and update ops for one batch size.

    program = lower(graph, batch=64, mode="train", update=Update(momentum=0.9))

Storage is decided here and nowhere else: ReLU, dropout and sums write over their input where no backward op reads
that input, the branches of a concatenation write straight into its channels, and gradients of a sum share one
storage. Gradient sums at forks are taken in the fixed order of backward: the first term writes, later ones accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vdnn.errors import ShapeError
from vdnn.layers.base import Parameter
from vdnn.layers.graph import Graph, Node
from vdnn.layers.images import image_form
from vdnn.layers.joint import FILTERS, Joint
from vdnn.layers.layout import with_layouts
from vdnn.layers.op import Op, Program
from vdnn.layers.rewrite import rewritten
from vdnn.layers.tensor import IMAGES, LABELS, Shape, TensorSpec
from vdnn.layers.update import STEP, STEP_BYTES, Update, Updates

__all__ = ["IMAGES", "LABELS", "MODES", "STEP", "STEP_BYTES", "Lowering", "Update", "lower"]

MODES = ("train", "eval", "first", "middle", "last")
HALF_DTYPES = ("bfloat16", "float16")
"""Of activations and their gradients; parameters, their gradients, statistics and sums stay float32 beside them."""


class Lowering:
    """What a layer sees while it emits its ops."""

    def __init__(
        self,
        graph: Graph,
        batch: int,
        mode: str,
        update: Update,
        dtype: str,
        layouts: Mapping[str, str],
        pad_channels: int = 1,
        update_together: bool = False,
    ):
        self.graph, self.batch, self.mode, self.update, self.dtype = graph, batch, mode, update, dtype
        self._updates = Updates(update, update_together)
        self.joint = Joint(update_together and mode != "eval")
        self.layouts = layouts
        self._layout = layouts[graph.input]  # of the layer that emits its ops
        self.parameter_dtype = "float32" if dtype in HALF_DTYPES else dtype
        self.training = mode != "eval"
        self.head = graph.loss
        for tensor, consumers in graph.consumers.items():
            if not consumers and graph.shape(tensor):
                raise ShapeError(tensor, "y", expected="a later layer that reads it, up to a loss", got="none")
        kept = set(graph.nodes) if self.training else graph.ancestors(self.head.name)
        self.nodes = [node for node in graph.nodes.values() if node.name in kept]
        self.consumers = {t: [c for c in names if c in kept] for t, names in graph.consumers.items()}
        readers = [graph.nodes[name] for name in self.consumers[graph.input]]
        self.images = image_form(graph.input_shape, readers, self._layout, pad_channels)
        self.tensors: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []
        self.persistent: list[str] = []
        self.fetches: list[str] = []
        self._value: dict[str, str] = {graph.input: graph.input}
        self._grad: dict[str, str] = {}
        self._slot: dict[str, tuple[str, int]] = {}  # output written into channels of a later concatenation
        self._phase = "forward"
        self._learns: set[str] = set()  # graph tensors with a trainable layer at or before them
        for node in self.nodes:
            own = any(p.trainable for p in graph.parameters(node))
            if own or any(t in self._learns for t in node.inputs):
                self._learns.add(node.name)

    # ---- tensors

    def tensor(
        self,
        name: str,
        role: str,
        shape: Shape,
        *,
        dtype: str | None = None,
        layout: str | None = None,
        view_of: str | None = None,
        channel: int = 0,
    ) -> str:
        """Declare a tensor; a view of a view becomes a view of the storage. Returns `name`.

        Without `layout` images and filters have that of the layer whose ops are emitted; without `dtype` activations
        and their gradients have that of the program, all else has that of parameters.
        """
        layout = layout or (self._layout if len(shape) == 4 else "NCHW")
        if view_of is not None:
            base = self.tensors[view_of]
            view_of, channel = base.storage, channel + base.channel
        dtype = dtype or (self.dtype if role in ("act", "grad") else self.parameter_dtype)
        self.tensors[name] = TensorSpec(name, role, shape, dtype, layout, view_of, channel)
        return name

    def value(self, tensor: str) -> str:
        """The Program tensor that holds the graph tensor `tensor`."""
        return self._value[tensor]

    def output(self, node: Node, *, over: str | None = None) -> str:
        """Declare y of `node`, over the bytes of graph tensor `over` if no backward op needs that value."""
        shape = (self.batch, *node.shape)
        self._value[node.name] = node.name
        if over is not None and self._may_overwrite(over, node):
            return self.tensor(node.name, "act", shape, view_of=self.value(over))
        if node.name in self._slot:
            whole, channel = self._slot[node.name]
            return self.tensor(node.name, "act", shape, view_of=whole, channel=channel)
        return self.tensor(node.name, "act", shape)

    def pass_through(self, node: Node) -> None:
        """y of `node` is its input's own tensor: no op, no bytes."""
        self._value[node.name] = self._value[node.inputs[0]]

    def parameter(self, node: Node, suffix: str) -> str:
        """Name of a parameter or statistic of `node`."""
        return f"{node.name}.{suffix}"

    def prepare_filter(self, node: Node) -> str:
        """The weight as the products of `node` read it, declared and made here where it is not the parameter itself.

        It is another tensor where activations are narrower than parameters, or the images have another form than those
        of the network (see vdnn.layers.images): channels that w has not are then 0.
        """
        weight, used = self.parameter(node, "weight"), self.used_filter(node)
        if used == weight:
            return weight
        shape = self.tensors[weight].shape
        if self._reads_formed(node):
            shape = self.images.filters(shape)
        self.tensor(used, "aux", shape, dtype=self.dtype)
        self.joint.add(self, node, FILTERS, {"w": weight}, {"y": used}, attrs=self.filter_attrs(node))
        return used

    def used_filter(self, node: Node) -> str:
        """The name of the weight as the products of `node` read it."""
        weight = self.parameter(node, "weight")
        return f"{weight}.used" if self.dtype != self.parameter_dtype or self._reads_formed(node) else weight

    def filter_attrs(self, node: Node) -> dict[str, Any]:
        """Attributes of ops that make the filters of `node` or their gradient: the stride that is in their channels."""
        return self.images.filter_attrs if self._reads_formed(node) else {}

    def _reads_formed(self, node: Node) -> bool:
        return self.graph.input in node.inputs and self.images.shape != self.graph.input_shape

    def _may_overwrite(self, tensor: str, node: Node) -> bool:
        return node.inputs.count(tensor) == 1 and not self._read_elsewhere(tensor)

    def _read_elsewhere(self, tensor: str) -> bool:
        """Whether more than one consumer reads the bytes of `tensor`: another one, or a backward op of its producer."""
        if tensor == self.graph.input or len(self.consumers[tensor]) != 1:
            return True
        node = self.graph.nodes[tensor]
        if node.layer.joins_channels or node.layer.passes_through(self.training):
            return any(self._read_elsewhere(t) for t in node.inputs)
        return self.training and node.layer.needs_output

    # ---- gradients

    def requires_grad(self, tensor: str) -> bool:
        """Whether `tensor` depends on a weight; the images never need a gradient."""
        return tensor in self._learns

    def canonical(self, tensor: str) -> str:
        """The graph tensor whose value `tensor` is, below layers that pass their input through."""
        while tensor in self.graph.nodes and self.graph.nodes[tensor].layer.passes_through(training=True):
            tensor = self.graph.nodes[tensor].inputs[0]
        return tensor

    def grad(self, tensor: str) -> str:
        """dy: the Program tensor of the gradient of graph tensor `tensor`."""
        return self._grad[self.canonical(tensor)]

    def has_grad(self, tensor: str) -> bool:
        """Whether some consumer has contributed to the gradient of `tensor` yet."""
        return self.canonical(tensor) in self._grad

    def contribute(self, tensor: str, *, over: str | None = None) -> tuple[str, bool]:
        """Where a backward op writes its term of d(tensor), and whether it accumulates on earlier terms.

        Args:
            over: a gradient tensor whose bytes the first term may take (dx over dy).
        """
        tensor = self.canonical(tensor)
        if tensor in self._grad:
            return self._grad[tensor], True
        if over is not None:
            # channels of a flattened storage are no channels of images: neither this gradient nor branches may be some
            root = self.tensors[self.tensors[over].storage]
            parts = self.graph.nodes[tensor].layer.joins_channels or self.tensors[over].nbytes != root.nbytes
            over = None if parts and root.shape[2:] != self.graph.shape(tensor)[1:] else over
        return self._declare_gradient(tensor, over), False

    def share_grad(self, tensor: str, whole: str, channel: int | None = None) -> None:
        """d(tensor) is the gradient tensor `whole`, or its channels from `channel` on: no op, no bytes."""
        tensor = self.canonical(tensor)
        if channel is None:
            self._grad[tensor] = whole
        else:
            self._declare_gradient(tensor, whole, channel)

    def _declare_gradient(self, tensor: str, view_of: str | None, channel: int = 0) -> str:
        shape = (self.batch, *self.graph.shape(tensor))
        layout = self.layouts[tensor] if len(shape) == 4 else None
        name = self.tensor(f"{tensor}.grad", "grad", shape, layout=layout, view_of=view_of, channel=channel)
        self._grad[tensor] = name
        return name

    # ---- ops

    def emit(
        self,
        node: Node,
        kind: str,
        reads: Mapping[str, str],
        writes: Mapping[str, str],
        *,
        attrs: Mapping[str, Any] | None = None,
        accumulate: tuple[str, ...] = (),
        phase: str | None = None,
        name: str | None = None,
    ) -> None:
        """Append an op of `node`; its name is "LAYER.WHAT" with WHAT the kind's second part."""
        self.ops.append(
            Op(
                name or f"{node.name}.{kind.split('.', 1)[1]}",
                kind,
                node.name,
                phase or self._phase,
                dict(reads),
                dict(writes),
                dict(attrs or {}),
                accumulate,
            )
        )

    def emit_update(self, node: Node, suffix: str) -> None:
        """Append the update of a parameter, here or at the end, unless this part of an accumulated step has none."""
        if self.mode in ("first", "middle"):
            return
        self._updates.add(self, node, suffix)

    def weight_gradient(self, node: Node, suffix: str) -> str:
        """The dw tensor of a parameter."""
        return f"{node.name}.{suffix}.grad"

    def accumulates(self, *arguments: str) -> tuple[str, ...]:
        """`arguments` (weight gradients among an op's writes) if this part of an accumulated step adds to them."""
        return arguments if self.mode in ("middle", "last") else ()

    # ---- the whole

    def run(self, mean: tuple[float, ...], std: tuple[float, ...], ahead: bool) -> Program:
        """Emit every op and collect the Program."""
        self._declare_step(mean, std, ahead)
        for node in self.nodes:
            self._layout = self.layouts[node.name]
            for parameter in self.graph.parameters(node):
                self._declare_parameter(node, parameter)
        self._place_concats()
        for node in self.nodes:
            self._layout = self.layouts[node.name]
            node.layer.forward(self, node)
        self.joint.finish(self)
        if self.training:
            self._phase = "backward"
            for node in reversed(self.nodes):
                if self.requires_grad(node.name):
                    self._layout = self.layouts[node.name]
                    node.layer.backward(self, node)
            self._updates.finish(self)
        program = Program(
            self.graph.name,
            self.batch,
            self.mode,
            self.tensors,
            tuple(self.ops),
            tuple(self.persistent),
            (STEP, IMAGES, LABELS),
            (*self.fetches, STEP),
            f"{self.head.name}.loss",
            f"{self.head.name}.correct",
            (IMAGES,) if ahead else (),
        )
        program.validate()
        return program

    def _declare_step(self, mean: tuple[float, ...], std: tuple[float, ...], ahead: bool) -> None:
        self.persistent.append(self.tensor(STEP, "state", (STEP_BYTES,), dtype="uint8"))
        shape = (self.batch, *self.graph.input_shape)
        images = self.tensor(IMAGES, "input", shape, dtype="uint8", layout="NCHW")  # as data sets have them
        if ahead:  # labels need not be: few bytes, and no op waits for them before the loss
            self.persistent.append(images)
        self.tensor(LABELS, "label", (self.batch,), dtype="int32")
        data = self.tensor(self.graph.input, "act", (self.batch, *self.images.shape))
        attrs = {"mean": list(mean), "std": list(std), **self.images.attrs}
        self.ops.append(
            Op("data.normalize", "input.normalize", self.graph.input, "forward", {"x": images}, {"y": data}, attrs)
        )

    def _declare_parameter(self, node: Node, parameter: Parameter) -> None:
        name = self.parameter(node, parameter.suffix)
        role = "weight" if parameter.trainable else "state"
        self.persistent.append(self.tensor(name, role, parameter.shape))
        if not (parameter.trainable and self.training):
            return
        gradient = self.tensor(f"{name}.grad", "wgrad", parameter.shape)
        if self.mode != "train":  # gradients live on between the parts of an accumulated step
            self.persistent.append(gradient)
        if self.update.momentum:
            self.persistent.append(self.tensor(f"{name}.momentum", "state", parameter.shape))

    def _place_concats(self) -> None:
        """Let each branch of a concatenation write into its channels, if nothing else claims its bytes."""
        for node in reversed(self.nodes):
            if not node.layer.joins_channels:
                continue
            self._layout = self.layouts[node.name]
            whole = self.output(node)
            channel = 0
            for tensor in node.inputs:
                owner = self._owner(tensor, node)
                if owner is not None:
                    self._slot[owner] = (whole, channel)
                channel += self.graph.shape(tensor)[0]

    def _owner(self, tensor: str, node: Node) -> str | None:
        """The graph tensor that will own the bytes of `tensor` (below in-place layers), if it may move into `node`."""
        while tensor != self.graph.input and node.inputs.count(tensor) == 1 and tensor not in self._slot:
            producer = self.graph.nodes[tensor]
            layer, alias = producer.layer, producer.layer.passes_through(self.training)
            if layer.joins_channels:
                return None if tensor in self.tensors else tensor
            if alias and producer.shape != self.graph.shape(producer.inputs[0]):
                return None  # channels of a flattened tensor are no channels of images
            if not (alias or layer.works_in_place(self.training)):
                return tensor
            if not self._may_overwrite(producer.inputs[0], producer):
                return None if alias else tensor
            tensor, node = producer.inputs[0], producer
        return None


def lower(
    graph: Graph,
    batch: int,
    mode: str = "train",
    *,
    update: Update | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    dtype: str = "float32",
    ahead: bool = False,
    pool_indices: bool = False,
    layout: str = "NCHW",
    layouts: Mapping[str, str] | None = None,
    pad_channels: int = 1,
    fuse: bool = False,
    update_together: bool = False,
) -> Program:
    """The Program of `graph` for `batch` images.

    Args:
        mode: "train" (a whole step), "eval" (forward only), or the parts of an accumulated step: "first" writes the
            weight gradients, "middle" adds to them, "last" adds and updates.
        mean, std: per channel, of pixel values scaled to 0..1; the images arrive as uint8.
        dtype: of activations and their gradients: "float32", "bfloat16", "float16", or "float64" for gradient checks.
            All else is in float32 beside "bfloat16" and "float16", and products then read a copy of each weight.
        ahead: whether the images of a run are fed during the run before it (see Program.ahead).
        pool_indices: maximum pools write down their winners in training, so that backward needs neither their x nor the
            y of a ReLU right below (see vdnn.layers.winners); results are the same bits.
        layout: of images and filters, a key of vdnn.layers.tensor.MEMORY_ORDERS. Shapes stay logical; uploaded images
            are NCHW in any case, and vectors are in the order of NCHW.
        layouts: by layer, where it is another than `layout`; images are moved where neighbours differ
            (see vdnn.layers.layout). Layers that are not there mean nothing.
        pad_channels: normalised images get channels of zeros up to a multiple of this in NHWC, where only convolutions
            of one group read them, and if it is one convolution, its stride becomes channels too unless this is 1 (see
            vdnn.layers.images); results are the same but for the order of sums.
        fuse: layers apply the ReLUs and sums above them (see vdnn.layers.fuse); results are the same bits.
        update_together: one op updates all weights at the end, and in training one moves all running statistics and one
            makes all filters that are mere copies (see vdnn.layers.update and joint); results are the same bits.
    """
    if batch < 1 or mode not in MODES:
        expected = f"a batch of 1 or more and one of {', '.join(MODES)}"
        raise ShapeError(graph.name, graph.input, expected=expected, got=f"batch {batch}, mode '{mode}'")
    channels = graph.input_shape[0]
    graph = rewritten(graph, mode, pool_indices=pool_indices, fuse=fuse)
    graph, found = with_layouts(graph, layout, layouts or {})
    lowering = Lowering(graph, batch, mode, update or Update(), dtype, found, pad_channels, update_together)
    return lowering.run(mean or (0.5,) * channels, std or (0.5,) * channels, ahead)
