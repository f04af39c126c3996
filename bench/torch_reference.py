"""A vdnn graph run by PyTorch's own operators, to compare losses, weights and times with.

    peer = TorchTrainer(graph, init_parameters(graph, seed=0), Update(momentum=0.9), lr=1e-4, mean=mean, std=std)
    run = peer.train(batches(split, order, 0, 64))
    run.losses; run.weights["conv1.weight"]

PyTorch is not needed by vdnn and never installed by it: it is imported when a trainer is made. Nothing of vdnn computes
here; only the graph's description and the first weights are taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdnn.errors import BackendUnavailable, VdnnError
from vdnn.layers import Graph, Layer, Update
from vdnn.layers.base import pair

Array = NDArray[Any]
Tensor = Any
"""A torch.Tensor."""


def load_torch() -> Any:
    """The module torch; BackendUnavailable if it is not installed."""
    try:
        return import_module("torch")
    except ImportError as error:
        raise BackendUnavailable(
            f"PyTorch cannot be imported ({error}); install it beside vdnn to compare with it"
        ) from error


@dataclass(frozen=True, slots=True)
class Call:
    """What the operator of one layer gets.

    Args:
        x: the inputs, (N, C, H, W) or (N, C) each.
        parameters: of the layer, by suffix.
        labels: (N,), int64.
    """

    torch: Any
    name: str
    layer: Any
    x: list[Tensor]
    parameters: Mapping[str, Tensor]
    labels: Tensor

    @property
    def f(self) -> Any:
        """torch.nn.functional."""
        return self.torch.nn.functional


def _conv(call: Call) -> Tensor:
    layer, p = call.layer, call.parameters
    sizes = (pair(layer.stride), pair(layer.padding), pair(layer.dilation))
    return call.f.conv2d(call.x[0], p["weight"], p.get("bias"), *sizes, layer.groups)


def _pool(call: Call) -> Tensor:
    x, layer = call.x[0], call.layer
    kernel = tuple(x.shape[2:]) if layer.kernel == "global" else pair(layer.kernel)
    stride = kernel if layer.kernel == "global" or layer.stride is None else pair(layer.stride)
    window = {"stride": stride, "padding": pair(layer.padding), "ceil_mode": layer.ceil_mode}
    if layer.mode == "max":
        return call.f.max_pool2d(x, kernel, **window)
    return call.f.avg_pool2d(x, kernel, count_include_pad=layer.count_include_pad, **window)


def _lrn(call: Call) -> Tensor:
    # torch averages over the window, as alpha / size does; where size is even its window reaches one channel further
    # down, ours (ONNX's) one further up: the same window with the channels in reverse
    layer, even = call.layer, call.layer.size % 2 == 0
    x = call.x[0].flip(1) if even else call.x[0]
    y = call.f.local_response_norm(x, layer.size, layer.alpha, layer.beta, layer.k)
    return y.flip(1) if even else y


def _batchnorm(call: Call) -> Tensor:
    p, layer = call.parameters, call.layer
    running = p["running_mean"], p["running_var"]
    return call.f.batch_norm(call.x[0], *running, p["weight"], p["bias"], True, layer.momentum, layer.eps)


def _dropout(call: Call) -> Tensor:
    if call.layer.p:
        raise VdnnError(
            f"layer '{call.name}': expected dropout of 0, got {call.layer.p:g}: PyTorch draws other numbers than vdnn; "
            "build the network with dropout=0"
        )
    return call.x[0]


def _softmax_loss(call: Call) -> Tensor:
    return call.f.cross_entropy(call.x[0], call.labels, label_smoothing=call.layer.label_smoothing)


OPERATORS: Mapping[str, Callable[[Call], Tensor]] = {
    "conv": _conv,
    "pool": _pool,
    "relu": lambda call: call.f.relu(call.x[0]),
    "lrn": _lrn,
    "linear": lambda call: call.f.linear(call.x[0], call.parameters["weight"], call.parameters.get("bias")),
    "batchnorm": _batchnorm,
    "dropout": _dropout,
    "concat": lambda call: call.torch.cat(call.x, 1),
    "add": lambda call: call.x[0] + call.x[1],
    "flatten": lambda call: call.x[0].flatten(1),
    "softmax_loss": _softmax_loss,
}
"""By layer kind. The loss is the mean over the images of a batch, without the weight of its head."""


@dataclass(frozen=True, slots=True)
class TorchRun:
    """Mean loss of the main head before each step; weights and statistics after the last, by name."""

    losses: tuple[float, ...]
    weights: dict[str, Array]


class TorchTrainer:
    """Training steps of `graph` in training mode, by SGD.

    Sets PyTorch's process-wide switches: no TF32; deterministic algorithms where there are any, or with `fast` the
    fastest that cuDNN finds.

    Args:
        weights: first values by name, "LAYER.SUFFIX", parameters and statistics; copied.
        lr: learning rate, rounded to float32 as vdnn passes it to its kernels.
        mean, std: per channel, of pixel values scaled to 0..1.
        device: "cpu" or "cuda".
        dtype: "float32" or "float64".
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Array],
        update: Update,
        *,
        lr: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: str = "cpu",
        dtype: str = "float32",
        fast: bool = False,
    ):
        self.torch = torch = load_torch()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = not fast, fast
        torch.use_deterministic_algorithms(not fast, warn_only=True)
        self.graph, self.update, self.device, self._kind = graph, update, device, getattr(torch, dtype)
        self._mean, self._std = (self._tensor(np.reshape(values, (-1, 1, 1))) for values in (mean, std))
        self._values: dict[str, dict[str, Tensor]] = {}
        groups: dict[float, list[Tensor]] = {}
        for node in graph.nodes.values():
            self._values[node.name] = {}
            for parameter in graph.parameters(node):
                value = self._tensor(weights[f"{node.name}.{parameter.suffix}"])
                self._values[node.name][parameter.suffix] = value
                if parameter.trainable:
                    decays = parameter.decay or update.decay_bias_and_norm
                    decay = update.weight_decay if decays else 0.0
                    groups.setdefault(decay, []).append(value.requires_grad_())
        self.optimizer = torch.optim.SGD(
            [{"params": tensors, "weight_decay": decay} for decay, tensors in groups.items()],
            lr=float(np.float32(lr)),
            momentum=update.momentum,
            nesterov=update.nesterov,
        )

    def train(self, batches: Iterable[tuple[Array, Array]]) -> TorchRun:
        """One step for each (images, labels) of `batches`."""
        losses = [self.step(images, labels) for images, labels in batches]
        return TorchRun(tuple(float(loss) for loss in losses), self.weights())

    def step(self, images: Array, labels: Array) -> Tensor:
        """One step; the mean loss of the main head before it, a scalar on the device that nothing has waited for.

        Args:
            images: (N, C, H, W), uint8.
            labels: (N,), int32.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total, main = self._forward(self._upload(images), self._upload(labels).long())
        total.backward()
        self.optimizer.step()
        return main.detach()

    def weights(self) -> dict[str, Array]:
        """Parameters and statistics as they are now, by name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self._named()}

    def gradients(self) -> dict[str, Array]:
        """Gradients of the last step, before weight decay, by the name of the parameter."""
        return {name: value.grad.cpu().numpy().copy() for name, value in self._named() if value.grad is not None}

    def momentum(self) -> dict[str, Array]:
        """Momentum after the last step by the name of the parameter; empty before the first, or if there is none."""
        state = self.optimizer.state
        buffers = {name: state.get(value, {}).get("momentum_buffer") for name, value in self._named()}
        return {name: buffer.cpu().numpy().copy() for name, buffer in buffers.items() if buffer is not None}

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of all heads by their weights, and the main head alone."""
        values = {self.graph.input: (images.to(self._kind) / 255 - self._mean) / self._std}
        total: Tensor = 0.0
        for node in self.graph.nodes.values():
            x = [values[name] for name in node.inputs]
            values[node.name] = self._apply(node.name, node.layer, x, labels)
            if node.layer.kind == "softmax_loss":
                total = total + getattr(node.layer, "weight", 1.0) * values[node.name]
        return total, values[self.graph.loss.name]

    def _apply(self, name: str, layer: Layer, x: list[Tensor], labels: Tensor) -> Tensor:
        if layer.kind not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise VdnnError(
                f"layer '{name}': expected a kind that PyTorch is asked to run ({known}), got '{layer.kind}'"
            )
        return OPERATORS[layer.kind](Call(self.torch, name, layer, x, self._values[name], labels))

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        for layer, parameters in self._values.items():
            yield from ((f"{layer}.{suffix}", value) for suffix, value in parameters.items())

    def _tensor(self, array: Array) -> Tensor:
        return self.torch.tensor(array, dtype=self._kind, device=self.device)

    def _upload(self, array: Array) -> Tensor:
        # PyTorch warns of arrays that it could not write to
        return self.torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)
