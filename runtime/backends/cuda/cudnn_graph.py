"""Convolutions by cuDNN's engines (the graph API): some 40 plans a problem, each with its exact workspace.

    for plan in plans(handle, problem):
        print(plan.algorithm, plan.workspace_bytes, plan.notes)   # graph:eng70_k2=12_k18=0 602128 ()
    plan(handle, problem, "graph:eng70_k2=12_k18=0").run(handle, x_ptr, w_ptr, y_ptr, workspace_ptr, accumulate=False)

A label names an engine and its knobs, which mean something for one cuDNN version only. With DeviceProperties in place
of the handle the same calls list the plans of a GPU that is not there; such plans cannot run.

The plans of a problem with an epilogue apply it: one graph of the convolution, the addition of a bias (K,) and a ReLU,
between which nothing is stored. Their labels begin with "fused:". cuDNN 9.19 has its compiled kernels only for a bias
in the dtype of the problem, and for a ReLU without bias none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from vdnn.runtime.backends.cuda.cudnn import CROSS_CORRELATION, DATA_TYPES, CudnnError, Handle
from vdnn.runtime.backends.cuda.cudnn_backend import Attribute, BackendDescriptor, DeviceProperties, Kind, Type
from vdnn.runtime.backends.cuda.cudnn_conv import OPERANDS, ConvProblem, contiguous

NUMERICAL_NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "NONDETERMINISTIC",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
    "STRICT_NAN_PROP",
)
"""CUDNN_NUMERICAL_NOTE_<name>, by number."""

BEHAVIOR_NOTES = (
    "RUNTIME_COMPILATION",
    "REQUIRES_FILTER_INT8x32_REORDER",
    "REQUIRES_BIAS_INT8x32_REORDER",
    "SUPPORTS_CUDA_GRAPH_NATIVE_API",
    "CUBLASLT_DEPENDENCY",
)
"""CUDNN_BEHAVIOR_NOTE_<name>, by number."""

INEXACT = frozenset({"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"})
"""Notes of arithmetic below fp32. Without them a plan is probably fp32: only its error against float64 shows it."""

HEURISTICS: Mapping[str, int] = {"A": 3, "B": 1, "FALLBACK": 2}
"""CUDNN_HEUR_MODE_<name>, in the order in which they are asked."""

MOST_KNOBS, MOST_NOTES = 64, 32
"""Room for what an engine may list: 44 kinds of knobs and 10 notes in cuDNN 9.19."""

FUSED = "fused:"
"""Beginning of the label of a plan that applies the epilogue of its problem."""

POINTWISE: Mapping[str, int] = {"ADD": 0, "RELU_FWD": 100}
"""CUDNN_POINTWISE_<name>."""

_LABEL = re.compile(r"(?:fused:)?graph:eng(\d+)((?:_k\d+=-?\d+)*)")
_UNIQUE_IDS = {"x": 1, "w": 2, "y": 3, "bias": 4, "sums": 5, "biased": 6}


@dataclass(frozen=True, slots=True)
class _Operation:
    """The operation descriptor of a direction, and its attributes by what they hold."""

    kind: Kind
    alpha: Attribute
    beta: Attribute
    convolution: Attribute
    tensors: Mapping[str, Attribute]


_OPERATIONS: Mapping[str, _Operation] = {
    "forward": _Operation(
        Kind.OPERATION_CONVOLUTION_FORWARD,
        Attribute.OPERATION_CONVOLUTION_FORWARD_ALPHA,
        Attribute.OPERATION_CONVOLUTION_FORWARD_BETA,
        Attribute.OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
        {
            "x": Attribute.OPERATION_CONVOLUTION_FORWARD_X,
            "w": Attribute.OPERATION_CONVOLUTION_FORWARD_W,
            "y": Attribute.OPERATION_CONVOLUTION_FORWARD_Y,
        },
    ),
    "dgrad": _Operation(
        Kind.OPERATION_CONVOLUTION_BACKWARD_DATA,
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_BETA,
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
        {
            "x": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DX,
            "w": Attribute.OPERATION_CONVOLUTION_BWD_DATA_W,
            "y": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DY,
        },
    ),
    "wgrad": _Operation(
        Kind.OPERATION_CONVOLUTION_BACKWARD_FILTER,
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_BETA,
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
        {
            "x": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_X,
            "w": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DW,
            "y": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DY,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A ConvPlan by one engine with its knobs; `workspace_bytes` is enough with and without accumulation.

    One with an epilogue writes y anew, and so does a filter gradient that goes to a scratch: they cannot accumulate.
    """

    algorithm: str
    workspace_bytes: int
    deterministic: bool
    notes: tuple[str, ...]
    problem: ConvProblem
    _plans: Mapping[bool, BackendDescriptor]

    def run(
        self,
        handle: Handle,
        a_ptr: int,
        b_ptr: int,
        out_ptr: int,
        workspace_ptr: int,
        accumulate: bool,
        bias_ptr: int = 0,
    ) -> None:
        """As ConvPlan.run."""
        pointers = dict(zip(OPERANDS[self.problem.direction], (a_ptr, b_ptr, out_ptr), strict=True))
        if self.problem.epilogue == "bias+relu":
            pointers["bias"] = bias_ptr
        pack = BackendDescriptor(handle.api, Kind.VARIANT_PACK, str(self.problem))
        pack.set(Attribute.VARIANT_PACK_UNIQUE_IDS, Type.INT64, *(_UNIQUE_IDS[name] for name in pointers))
        pack.set(Attribute.VARIANT_PACK_DATA_POINTERS, Type.VOID_PTR, *pointers.values())
        pack.set(Attribute.VARIANT_PACK_WORKSPACE, Type.VOID_PTR, workspace_ptr or None)
        pack.finalize()
        arguments = (handle.pointer, self._plans[accumulate].pointer, pack.pointer)
        handle.api.call("cudnnBackendExecute", *arguments, about=self.problem, algorithm=self.algorithm)


def plans(
    target: Handle | DeviceProperties,
    problem: ConvProblem,
    *,
    tensor_cores: bool = False,
    runtime_compiled: int = 0,
    most: int | None = None,
) -> list[GraphPlan]:
    """The plans that cuDNN's heuristics name for `problem` and that can be built, in their order.

    Args:
        tensor_cores: also those whose arithmetic is noted as below fp32 (TF32), and all that take 16-bit operands.
        runtime_compiled: if there are no others, at most so many of those whose kernels NVRTC compiles now, which takes
            a second or more each, at every start.
        most: plans to build, the first ones; None for all. To build one takes time too.
    """
    convolution = _Convolution(target, problem)
    wanted = [(label, notes) for label, notes in convolution.suggestions() if tensor_cores or INEXACT.isdisjoint(notes)]
    found = convolution.built((label for label, notes in wanted if "RUNTIME_COMPILATION" not in notes), most)
    if found or not runtime_compiled:
        return found
    return convolution.built((label for label, notes in wanted if "RUNTIME_COMPILATION" in notes), runtime_compiled)


def plan(target: Handle | DeviceProperties, problem: ConvProblem, algorithm: str) -> GraphPlan:
    """The plan of a recorded label, without the heuristics; CudnnError if this cuDNN refuses it."""
    return _Convolution(target, problem).plan(algorithm)


class _Convolution:
    """The operation graphs of a problem, out = conv(a, b) and where it can out += conv(a, b), and their plans."""

    def __init__(self, target: Handle | DeviceProperties, problem: ConvProblem):
        self.target, self.problem, self.words = target, problem, str(problem)
        anew = bool(problem.epilogue or problem.scratch_bytes)
        self.graphs = {accumulate: self._graph(accumulate) for accumulate in ((False,) if anew else (False, True))}

    def suggestions(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Labels and notes of the engine configurations that the heuristics name, each once."""
        seen = set()
        for mode in HEURISTICS.values():
            heuristics = self._new(Kind.ENGINEHEUR)
            heuristics.set(Attribute.ENGINEHEUR_OPERATION_GRAPH, Type.BACKEND_DESCRIPTOR, self.graphs[False])
            heuristics.set(Attribute.ENGINEHEUR_MODE, Type.HEUR_MODE, mode)
            self._attach(heuristics, None, Attribute.ENGINEHEUR_DEVICEPROP)
            try:
                heuristics.finalize()
            except CudnnError as error:
                if error.likely_cause != "unsupported":
                    raise
                continue
            results = Attribute.ENGINEHEUR_RESULTS
            count = heuristics.count(results, Type.BACKEND_DESCRIPTOR)
            for config in heuristics.get_descriptors(results, Kind.ENGINECFG, count):
                label, notes = _describe(config)
                label = f"{FUSED}{label}" if self.problem.epilogue else label
                if label not in seen:
                    seen.add(label)
                    yield label, notes

    def built(self, labels: Iterable[str], limit: int | None) -> list[GraphPlan]:
        """The plans of those of these labels that can be built, the first `limit` of them."""
        found: list[GraphPlan] = []
        for label in labels:
            if len(found) == limit:
                break
            try:
                found.append(self.plan(label))
            except CudnnError:  # the heuristics also name engines that refuse to be built
                continue
        return found

    def plan(self, label: str) -> GraphPlan:
        """The plan of an engine with its knobs, for every graph."""
        configs = {accumulate: self._config(graph, label) for accumulate, graph in self.graphs.items()}
        notes = _describe(configs[False])[1]
        built = {}
        for accumulate, config in configs.items():
            built[accumulate] = self._new(Kind.EXECUTION_PLAN, label)
            built[accumulate].set(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, Type.BACKEND_DESCRIPTOR, config)
            self._attach(built[accumulate], Attribute.EXECUTION_PLAN_HANDLE, Attribute.EXECUTION_PLAN_DEVICEPROP)
            built[accumulate].finalize()
        workspace = max(p.get(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64)[0] for p in built.values())
        return GraphPlan(label, workspace, "NONDETERMINISTIC" not in notes, notes, self.problem, built)

    def _new(self, kind: Kind, label: str = "") -> BackendDescriptor:
        about = f"{self.words}, algorithm {label}" if label else self.words
        return BackendDescriptor(self.target.api, kind, about)

    def _attach(self, descriptor: BackendDescriptor, handle: Attribute | None, device: Attribute | None) -> None:
        """Tell a descriptor for which GPU it is: the handle's, or the one described."""
        if isinstance(self.target, DeviceProperties):
            if device is not None:
                descriptor.set(device, Type.BACKEND_DESCRIPTOR, self.target.descriptor)
        elif handle is not None:
            descriptor.set(handle, Type.HANDLE, self.target.pointer)

    def _graph(self, accumulate: bool) -> BackendDescriptor:
        problem, operation = self.problem, _OPERATIONS[self.problem.direction]
        tensors = {name: self._tensor(name) for name in ("x", "w", "y")}
        operations: list[BackendDescriptor] = []
        if problem.epilogue:
            tensors["y"], operations = self._epilogue(tensors["y"])
        descriptor = self._new(operation.kind)
        descriptor.set(operation.alpha, Type.FLOAT, 1.0)
        descriptor.set(operation.beta, Type.FLOAT, 1.0 if accumulate else 0.0)
        descriptor.set(operation.convolution, Type.BACKEND_DESCRIPTOR, self._convolution())
        for name, tensor in tensors.items():
            descriptor.set(operation.tensors[name], Type.BACKEND_DESCRIPTOR, tensor)
        graph = self._new(Kind.OPERATIONGRAPH)
        graph.set(Attribute.OPERATIONGRAPH_OPS, Type.BACKEND_DESCRIPTOR, descriptor.finalize(), *operations)
        self._attach(graph, Attribute.OPERATIONGRAPH_HANDLE, None)
        return graph.finalize()

    def _epilogue(self, y: BackendDescriptor) -> tuple[BackendDescriptor, list[BackendDescriptor]]:
        """The tensor of the sums, which is never stored, and the operations that make `y` of it."""
        sums = rest = self._tensor("sums")
        operations = []
        if self.problem.epilogue == "bias+relu":
            rest = self._tensor("biased")
            operations.append(self._pointwise("ADD", sums, rest, self._tensor("bias")))
        return sums, [*operations, self._pointwise("RELU_FWD", rest, y)]

    def _pointwise(
        self, mode: str, x: BackendDescriptor, y: BackendDescriptor, b: BackendDescriptor | None = None
    ) -> BackendDescriptor:
        """y = mode(x) or mode(x, b), in fp32."""
        pointwise = self._new(Kind.POINTWISE)
        pointwise.set(Attribute.POINTWISE_MODE, Type.POINTWISE_MODE, POINTWISE[mode])
        pointwise.set(Attribute.POINTWISE_MATH_PREC, Type.DATA_TYPE, DATA_TYPES["float32"])
        operation = self._new(Kind.OPERATION_POINTWISE)
        operation.set(Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR, Type.BACKEND_DESCRIPTOR, pointwise.finalize())
        operation.set(Attribute.OPERATION_POINTWISE_XDESC, Type.BACKEND_DESCRIPTOR, x)
        operation.set(Attribute.OPERATION_POINTWISE_YDESC, Type.BACKEND_DESCRIPTOR, y)
        if b is not None:
            operation.set(Attribute.OPERATION_POINTWISE_BDESC, Type.BACKEND_DESCRIPTOR, b)
        return operation.finalize()

    def _convolution(self) -> BackendDescriptor:
        problem = self.problem
        descriptor = self._new(Kind.CONVOLUTION)
        descriptor.set(Attribute.CONVOLUTION_SPATIAL_DIMS, Type.INT64, 2)
        descriptor.set(Attribute.CONVOLUTION_COMP_TYPE, Type.DATA_TYPE, DATA_TYPES["float32"])
        descriptor.set(Attribute.CONVOLUTION_CONV_MODE, Type.CONVOLUTION_MODE, CROSS_CORRELATION)
        descriptor.set(Attribute.CONVOLUTION_PRE_PADDINGS, Type.INT64, *problem.padding)
        descriptor.set(Attribute.CONVOLUTION_POST_PADDINGS, Type.INT64, *problem.padding)
        descriptor.set(Attribute.CONVOLUTION_FILTER_STRIDES, Type.INT64, *problem.stride)
        descriptor.set(Attribute.CONVOLUTION_DILATIONS, Type.INT64, *problem.dilation)
        return descriptor.finalize()

    def _tensor(self, name: str) -> BackendDescriptor:
        problem = self.problem
        filters, virtual = problem.y[1], name in ("sums", "biased")
        shape = {"x": problem.x, "w": problem.w, "bias": (1, filters, 1, 1)}.get(name, problem.y)
        strides = {**problem.strides(), "bias": contiguous((1, filters, 1, 1), problem.layout)}
        descriptor = self._new(Kind.TENSOR)
        dtype = "float32" if virtual else problem.dtype
        descriptor.set(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, DATA_TYPES[dtype])
        descriptor.set(Attribute.TENSOR_DIMENSIONS, Type.INT64, *shape)
        descriptor.set(Attribute.TENSOR_STRIDES, Type.INT64, *strides.get(name, strides["y"]))
        descriptor.set(Attribute.TENSOR_UNIQUE_ID, Type.INT64, _UNIQUE_IDS[name])
        descriptor.set(Attribute.TENSOR_BYTE_ALIGNMENT, Type.INT64, problem.alignment)
        if virtual:
            descriptor.set(Attribute.TENSOR_IS_VIRTUAL, Type.BOOLEAN, True)
        return descriptor.finalize()

    def _config(self, graph: BackendDescriptor, label: str) -> BackendDescriptor:
        match = _LABEL.fullmatch(label)
        if match is None or label.startswith(FUSED) != bool(self.problem.epilogue):
            raise ValueError(f"'{label}' is not a label of the graph API; expected one like graph:eng70_k2=12_k18=0")
        engine = self._new(Kind.ENGINE, label)
        engine.set(Attribute.ENGINE_OPERATION_GRAPH, Type.BACKEND_DESCRIPTOR, graph)
        engine.set(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64, int(match[1]))
        self._attach(engine, None, Attribute.ENGINE_DEVICEPROP)
        config = self._new(Kind.ENGINECFG, label)
        config.set(Attribute.ENGINECFG_ENGINE, Type.BACKEND_DESCRIPTOR, engine.finalize())
        choices = []
        for knob, value in re.findall(r"_k(\d+)=(-?\d+)", match[2]):
            choice = self._new(Kind.KNOB_CHOICE, label)
            choice.set(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE, int(knob))
            choice.set(Attribute.KNOB_CHOICE_KNOB_VALUE, Type.INT64, int(value))
            choices.append(choice.finalize())
        if choices:
            config.set(Attribute.ENGINECFG_KNOB_CHOICES, Type.BACKEND_DESCRIPTOR, *choices)
        return config.finalize()


def _describe(config: BackendDescriptor) -> tuple[str, tuple[str, ...]]:
    """The label of an engine configuration and the notes of its engine."""
    engine = config.get_descriptors(Attribute.ENGINECFG_ENGINE, Kind.ENGINE, 1)[0]
    label = f"graph:eng{engine.get(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64)[0]}"
    for choice in config.get_descriptors(Attribute.ENGINECFG_KNOB_CHOICES, Kind.KNOB_CHOICE, MOST_KNOBS):
        knob = choice.get(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE)[0]
        label += f"_k{knob}={choice.get(Attribute.KNOB_CHOICE_KNOB_VALUE, Type.INT64)[0]}"
    numerical = engine.get(Attribute.ENGINE_NUMERICAL_NOTE, Type.NUMERICAL_NOTE, MOST_NOTES)
    behavior = engine.get(Attribute.ENGINE_BEHAVIOR_NOTE, Type.BEHAVIOR_NOTE, MOST_NOTES)
    return label, (*_names(numerical, NUMERICAL_NOTES), *_names(behavior, BEHAVIOR_NOTES))


def _names(numbers: list[int], names: tuple[str, ...]) -> tuple[str, ...]:
    """Notes by name; one that is newer than this file by its number."""
    return tuple(names[n] if n < len(names) else f"NOTE_{n}" for n in numbers)
