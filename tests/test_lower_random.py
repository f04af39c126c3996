"""Lowering against a plain reading of the graph: random networks, run with opaque kernels over shared bytes.

Every kernel is replaced by a hash of all it reads, so that one wrong, stale or overwritten value anywhere changes the
weight gradients. Sums are exact (modulo a prime), so the order of terms does not matter. Images are of one pixel: a
tensor is a list of one integer per channel, and a storage is a list that its views share. A fused op is run as what it
stands for, one kernel after the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from vdnn.layers import (
    Add,
    BatchNorm,
    Concat,
    Conv,
    Dropout,
    Flatten,
    Graph,
    Layer,
    Linear,
    Lrn,
    Op,
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    lower,
)

PRIME = 2**61 - 1
Values = list[int]


def opaque(*what: object) -> int:
    """A number that stands for a kernel's result: equal for equal `what` within one process, else different."""
    return hash(what) % PRIME


def kernel(kind: str, layer: str, argument: str, reads: dict[str, Values], channels: int) -> Values:
    """The result `argument` of a kernel that reads `reads`."""
    if argument == "status":  # the step state: no update meets a NaN here
        return constant("step", channels)
    if kind in ("copy.forward", "layout.transform"):
        return list(reads["x"])
    if kind == "add.forward":
        return total(reads["a"], reads["b"])
    layer = "" if kind.startswith("relu.") else layer  # one is as the other, and a fused one has no name of its own
    content = tuple((name, tuple(values)) for name, values in sorted(reads.items()))
    return [opaque(kind, layer, argument, content, c) for c in range(channels)]


def total(a: Iterable[int], b: Iterable[int]) -> Values:
    return [(one + two) % PRIME for one, two in zip(a, b, strict=True)]


def constant(name: str, channels: int) -> Values:
    """What a weight, a statistic or the data hold before the first op."""
    return [opaque("start", name, c) for c in range(channels)]


# ---- the program, op by op over storages


class Machine:
    """Storages as lists; persistent ones survive from program to program."""

    def __init__(self) -> None:
        self.bytes: dict[str, Values] = {}

    def run(self, program: Program) -> None:
        self.program = program
        for name, spec in program.tensors.items():
            if spec.view_of is None and not (name in program.persistent and name in self.bytes):
                self.bytes[name] = constant(name, self._channels(name))
        for op in program.ops:
            reads = {argument: self.read(tensor) for argument, tensor in op.reads.items()}
            for argument, tensor in op.writes.items():
                new = self._result(op, argument, reads, self._channels(tensor))
                if not op.kind.startswith(("sgd.", "batchnorm.update_stats")) and argument in op.accumulate:
                    new = total(self.read(tensor), new)
                self._write(tensor, new)

    def _result(self, op: Op, argument: str, reads: dict[str, Values], channels: int) -> Values:
        """What `op` computes for `argument`, a fused op as several kernels."""
        relu = "activation" in op.attrs
        if op.kind == "relu.bias_backward":
            dx = kernel("relu.backward", "", "dx", reads, len(reads["dy"]))
            unit = next(other.kind.split(".")[0] for other in self.program.ops if other.layer == op.layer)
            return dx if argument == "dx" else kernel(f"{unit}.bgrad", op.layer, "db", {"dy": dx}, channels)
        if op.kind == "batchnorm.backward" and relu:
            width = len(reads["dy"])
            inputs = {name: reads[name] for name in ("x", "weight", "bias") if name in reads}
            plain = kernel("batchnorm.forward", op.layer, "y", inputs, width)
            y = reads["y"] if "y" in reads else kernel("relu.forward", "", "y", {"x": plain}, width)
            g = kernel("relu.backward", "", "dx", {"y": y, "dy": reads["dy"]}, width)
            rest = {name: reads[name] for name in ("x", "weight", "mean", "invstd")}
            return g if argument == "dz" else kernel(op.kind, op.layer, argument, {**rest, "dy": g}, channels)
        if op.kind == "softmax_loss.train":
            scores = {name: reads[name] for name in ("x", "labels")}
            made = kernel("softmax_loss.forward", op.layer, "probs" if argument == "dx" else argument, scores, channels)
            given = {"probs": made, "labels": reads["labels"], "step": reads["step"]}
            return kernel("softmax_loss.backward", op.layer, "dx", given, channels) if argument == "dx" else made
        inputs = {name: values for name, values in reads.items() if name != "z"}
        result = kernel(op.kind, op.layer, argument, inputs, channels)
        if argument == "y" and "z" in reads:
            result = total(result, reads["z"])
        return kernel("relu.forward", "", "y", {"x": result}, channels) if argument == "y" and relu else result

    def read(self, tensor: str) -> Values:
        spec = self.program.tensors[tensor]
        return self.bytes[spec.storage][spec.channel : spec.channel + self._channels(tensor)]

    def _write(self, tensor: str, values: Values) -> None:
        spec = self.program.tensors[tensor]
        assert len(values) == self._channels(tensor)
        self.bytes[spec.storage][spec.channel : spec.channel + len(values)] = values

    def _channels(self, tensor: str) -> int:
        spec = self.program.tensors[tensor]
        return spec.shape[0] if spec.role in ("weight", "wgrad", "state") or len(spec.shape) == 1 else spec.shape[1]


# ---- the graph, by definition: every value has its own bytes


def start(graph: Graph, node: str, suffix: str) -> Values:
    parameter = next(p for p in graph.parameters(graph.nodes[node]) if p.suffix == suffix)
    return constant(f"{node}.{suffix}", parameter.shape[0])


def forward_values(graph: Graph, training: bool) -> dict[str, Values]:
    """Value of every tensor; "NODE.WHAT" for further results of a node."""
    labels, step = constant("labels", 2), constant("step", 64)
    value = {graph.input: kernel("input.normalize", "data", "y", {"x": constant("images", 2)}, 2)}
    for node in graph.nodes.values():
        kind, x = node.layer.kind, value[node.inputs[0]]
        weights = {p.suffix: start(graph, node.name, p.suffix) for p in graph.parameters(node)}
        reads = {"x": x}
        if kind == "concat":
            value[node.name] = [number for tensor in node.inputs for number in value[tensor]]
            continue
        if kind == "flatten" or (kind == "dropout" and not training):
            value[node.name] = x
            continue
        if kind in ("conv", "linear"):
            reads |= {"w": weights["weight"]} | ({"b": weights["bias"]} if "bias" in weights else {})
        elif kind == "batchnorm" and training:
            reads |= {"weight": weights["weight"], "bias": weights["bias"]}
            for extra in ("mean", "invstd"):
                value[f"{node.name}.{extra}"] = kernel("batchnorm.forward", node.name, extra, reads, node.shape[0])
        elif kind == "batchnorm":
            value[node.name] = kernel("batchnorm.inference", node.name, "y", reads | weights, node.shape[0])
            continue
        elif kind == "add":
            reads = {"a": x, "b": value[node.inputs[1]]}
        elif kind == "dropout":
            reads |= {"step": step}
        elif kind == "softmax_loss":
            reads |= {"labels": labels}
            for extra, channels in (("probs", graph.classes), ("loss", 2), ("correct", 2)):
                value[f"{node.name}.{extra}"] = kernel("softmax_loss.forward", node.name, extra, reads, channels)
            continue
        value[node.name] = kernel(f"{kind}.forward", node.name, "y", reads, node.shape[0])
    return value


def weight_gradients(graph: Graph) -> dict[str, Values]:
    """dw of every trainable parameter by the chain rule, each gradient a sum over the consumers."""
    value = forward_values(graph, training=True)
    labels, step = constant("labels", 2), constant("step", 64)
    gradient: dict[str, Values] = {t: [0] * graph.shape(t)[0] for t in graph.consumers if graph.shape(t)}
    found: dict[str, Values] = {}

    def give(tensor: str, term: Iterable[int]) -> None:
        gradient[tensor] = total(gradient[tensor], term)

    for node in reversed(graph.nodes.values()):
        kind, name, x, y = node.layer.kind, node.name, node.inputs[0], value.get(node.name, [])
        channels = graph.shape(x)[0]
        dy = gradient.get(name, [])
        if kind == "add":
            for tensor in node.inputs:
                give(tensor, dy)
        elif kind == "concat":
            for tensor in node.inputs:
                give(tensor, dy[: graph.shape(tensor)[0]])
                dy = dy[graph.shape(tensor)[0] :]
        elif kind == "flatten":
            give(x, dy)
        elif kind in ("conv", "linear"):
            if node.layer.bias:  # type: ignore[attr-defined]
                found[f"{name}.bias"] = kernel(f"{kind}.bgrad", name, "db", {"dy": dy}, node.shape[0])
            found[f"{name}.weight"] = kernel(f"{kind}.wgrad", name, "dw", {"x": value[x], "dy": dy}, node.shape[0])
            reads = {"w": start(graph, name, "weight"), "dy": dy}
            give(x, kernel(f"{kind}.dgrad", name, "dx", reads, channels))
        elif kind == "softmax_loss":
            reads = {"probs": value[f"{name}.probs"], "labels": labels, "step": step}
            give(x, kernel("softmax_loss.backward", name, "dx", reads, channels))
        else:
            if kind == "batchnorm":
                reads = {"x": value[x], "dy": dy, "weight": start(graph, name, "weight")}
                reads |= {extra: value[f"{name}.{extra}"] for extra in ("mean", "invstd")}
                for suffix in ("weight", "bias"):
                    found[f"{name}.{suffix}"] = kernel("batchnorm.backward", name, f"d{suffix}", reads, channels)
            elif kind == "lrn" or node.layer == Pool("max", 1):
                reads = {"x": value[x], "y": y, "dy": dy}
            else:
                reads = {"dy": dy} | {"relu": {"y": y}, "dropout": {"step": step}}.get(kind, {})
            give(x, kernel(f"{kind}.backward", name, "dx", reads, channels))
    return found


# ---- random networks


def random_graph(seed: int, fusible: float = 0.0) -> Graph:
    """Up to 14 layers with forks, sums, nested concatenations and tensors used twice, all joined into one loss.

    Args:
        fusible: share of layers after which another one comes that they may apply themselves.
    """
    rng = random.Random(seed)
    graph = Graph(f"random{seed}", (2, 1, 1), classes=3)
    on_vectors: list[Layer] = [Relu(), Dropout()]
    on_images = [*on_vectors, Relu(), BatchNorm(), Lrn(), Flatten(), Pool("max", 1), Pool("average", 1)]
    for i in range(rng.randint(2, 14)):
        tensors = [graph.input, *graph.nodes]
        recent = rng.choice(tensors[-3:])
        x = recent if rng.random() < 0.7 else rng.choice(tensors)
        image = len(graph.shape(x)) == 3
        same = [t for t in tensors if graph.shape(t) == graph.shape(x)]
        chance, name = rng.random(), f"n{i}"
        if chance < 0.3:
            weights = Conv(rng.randint(1, 3), 1, bias=rng.random() < 0.5) if image else Linear(rng.randint(1, 3))
            graph.add(name, weights, x)
        elif chance < 0.5:
            pair = [x, rng.choice(same)]
            rng.shuffle(pair)
            graph.add(name, Add(), pair)
        elif chance < 0.65:
            joinable = [t for t in tensors if len(graph.shape(t)) == len(graph.shape(x))]
            graph.add(name, Concat(), [x, *rng.choices(joinable, k=rng.randint(1, 2))])
        else:
            graph.add(name, rng.choice(on_images if image else on_vectors), x)
        if fusible and rng.random() < fusible:
            x, shape = name, graph.shape(name)
            if len(shape) == 3 and rng.random() < 0.6:
                x = graph.add(f"{name}norm", BatchNorm(), x)
                others = [t for t in (graph.input, *graph.nodes) if graph.shape(t) == shape]
                if rng.random() < 0.6:
                    pair = [x, rng.choice(others)]
                    rng.shuffle(pair)
                    x = graph.add(f"{name}sum", Add(), pair)
            if rng.random() < 0.8:
                graph.add(f"{name}relu", Relu(), x)
    loose = [t for t, consumers in graph.consumers.items() if not consumers]
    vectors = [t if len(graph.shape(t)) == 1 else graph.add(f"flat_{t}", Flatten(), t) for t in loose]
    if len(vectors) > 2 and rng.random() < 0.5:
        graph.add("loss_aux", SoftmaxLoss(weight=0.3), graph.add("fc_aux", Linear(3), vectors.pop()))
    x = graph.add("join", Concat(), vectors) if len(vectors) > 1 else vectors[0]
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), x))
    return graph


def check(graph: Graph, fuse: bool, layouts: Mapping[str, str] | None = None) -> None:
    """Train, eval and accumulated programs of `graph` compute what the graph says."""
    expected = weight_gradients(graph)

    def run(*modes: str) -> Machine:
        machine = Machine()
        for mode in modes:
            machine.run(lower(graph, 2, mode, fuse=fuse, update_together=fuse, layouts=layouts))
        return machine

    machine = run("train")
    assert {name: machine.read(f"{name}.grad") for name in expected} == expected
    machine = run("first", "middle", "last")
    tripled = {name: [3 * number % PRIME for number in values] for name, values in expected.items()}
    assert {name: machine.read(f"{name}.grad") for name in expected} == tripled
    assert run("eval").read("loss.loss") == forward_values(graph, training=False)["loss.loss"]


def check_both(graph: Graph) -> None:
    """As the graph has it, and fused."""
    check(graph, fuse=False)
    check(graph, fuse=True)


@pytest.mark.parametrize("block", range(10))
def test_random_networks_compute_what_the_graph_says(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        check_both(random_graph(seed))


@pytest.mark.parametrize("block", range(6))
def test_random_networks_of_layers_that_fuse_compute_what_the_graph_says(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        check(random_graph(seed, fusible=0.7), fuse=True)


def test_random_networks_have_all_that_a_fusion_makes() -> None:
    forms: Counter[tuple[str, ...]] = Counter()
    for seed in range(360):
        for mode in ("train", "eval"):
            forms.update(form(op) for op in lower(random_graph(seed, fusible=0.7), 2, mode, fuse=True).ops)
    assert min(forms[fused] for fused in FUSED) > 5, forms


FUSED = {
    ("conv.forward", "relu"),
    ("linear.forward", "relu"),
    ("relu.bias_backward",),
    ("batchnorm.forward", "relu"),
    ("batchnorm.forward", "z"),
    ("batchnorm.forward", "relu", "z"),
    ("batchnorm.inference", "relu", "z"),
    ("batchnorm.backward", "relu"),
    ("batchnorm.backward", "relu", "dz"),
    ("batchnorm.backward", "relu", "dz", "added"),
}


def form(op: Op) -> tuple[str, ...]:
    """What of `op` is there because of a fusion."""
    words = {"relu": "activation" in op.attrs, "z": "z" in op.reads, "dz": "dz" in op.writes}
    return op.kind, *(word for word, there in words.items() if there), *(["added"] if "dz" in op.accumulate else [])


# ---- hand-made networks that random ones seldom meet


def finish(graph: Graph, *tensors: str) -> Graph:
    """One loss on all of `tensors`."""
    vectors = [t if len(graph.shape(t)) == 1 else graph.add(f"flat_{t}", Flatten(), t) for t in tensors]
    x = graph.add("join", Concat(), vectors) if len(vectors) > 1 else vectors[0]
    graph.add("loss", SoftmaxLoss(), graph.add("fc", Linear(3), x))
    return graph


def blank() -> Graph:
    return Graph("case", (2, 1, 1), classes=3)


@pytest.mark.parametrize("layer", [Relu(), Dropout(), Lrn(), Pool("max", 1), Pool("average", 1), BatchNorm()])
def test_a_layer_on_the_images_has_no_gradient_below(layer: Layer) -> None:
    g = blank()
    x = g.add("first", layer, g.input)
    check_both(finish(g, g.add("conv", Conv(2, 1), x)))


def test_a_gradient_through_a_flatten_is_a_write() -> None:
    """The linear layer adds to the gradient of x after the sum has shared it with c, and before c reads it."""
    g = blank()
    x = g.add("x", Conv(2, 1), g.input)
    flat = g.add("flat", Flatten(), x)
    c = g.add("c", Conv(2, 1), g.input)
    fc = g.add("fc_x", Linear(2), flat)
    check_both(finish(g, fc, g.add("sum", Add(), [x, c])))


def test_a_value_behind_a_flatten_is_not_overwritten() -> None:
    g = blank()
    x = g.add("x", Conv(2, 1), g.input)
    relu = g.add("relu", Relu(), g.add("flat", Flatten(), x))
    check_both(finish(g, relu, g.add("later", Conv(2, 1), x)))


def test_a_value_behind_a_dropout_in_evaluation_is_not_overwritten() -> None:
    g = blank()
    x = g.add("x", Conv(2, 1), g.input)
    total = g.add("sum", Add(), [g.add("drop", Dropout(), x), x])
    check_both(finish(g, g.add("sum2", Add(), [total, x])))


def test_a_branch_read_elsewhere_is_not_overwritten_through_its_concatenation() -> None:
    g = blank()
    x, y = (g.add(name, Conv(2, 1), g.input) for name in "xy")
    relu = g.add("relu", Relu(), g.add("cat", Concat(), [x, y]))
    check_both(finish(g, relu, g.add("later", Conv(2, 1), x)))


def test_a_residual_tower_shares_one_gradient() -> None:
    """Identity blocks of convolution and sum, with and without ReLU after the sum."""
    for last in (True, False):
        g = blank()
        x = g.add("stem", Conv(2, 1), g.input)
        for i in range(4):
            y = g.add(f"relu{i}", Relu(), g.add(f"conv{i}a", Conv(2, 1), x))
            x = g.add(f"sum{i}", Add(), [g.add(f"conv{i}b", Conv(2, 1), y), x])
            x = g.add(f"out{i}", Relu(), x) if last else x
        check_both(finish(g, x))
        copies = [op.name for op in lower(g, 2).ops if op.kind == "copy.forward"]
        assert copies == []
