"""What a run is to do, as frozen data: read from YAML and checked, every error one line with file, line and key.

    config = load_config("lenet", ["train.batch_size=128", "memory.limit=12GiB"])
    config.train.batch_size == 128; config.memory.limit == 12 * 2**30
    print(config.dump())          # resolved YAML, which load_config reads back as an equal Config

The description of a field is what an error says was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vdnn.errors import ConfigError
from vdnn.networks import build
from vdnn.runtime.config_file import explain, packaged_configs, place_of, read
from vdnn.runtime.yaml_lines import dotted, dump
from vdnn.units import GIB, MIB, parse_bytes

__all__ = ["Config", "load_config", "packaged_configs"]


def _whole(value: Any) -> Any:
    """1e3 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_bytes(count: int | None) -> int | str | None:
    """ "12GiB" for whole units, so that a resolved file reads like a written one; always exact."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return count


def _bytes(value: Any) -> int:
    if not isinstance(value, (str, int, float)):
        raise ValueError("not an amount of bytes")
    return parse_bytes(value)


MOST_COUNT, MOST_NUMBER, MOST_RATE, MOST_BYTES = 10**12, 1e6, 1e38, 2**60
"""Beyond these a number is a slip of the hand; up to them nothing overflows. Rates must fit into float32."""


def _lower(value: object) -> object:
    """NCHW is nchw, as layouts are written elsewhere."""
    return value.lower() if isinstance(value, str) else value


Whole = Annotated[int, Strict(), BeforeValidator(_whole)]
Bytes = Annotated[
    int, BeforeValidator(_bytes), Field(le=MOST_BYTES), PlainSerializer(_plain_bytes, when_used="json-unless-none")
]

_COUNT = "a whole number from 1 to 10^12"
_BYTES = "an amount of bytes such as 12GiB, 12 GB or 12000000000, or null"


def _conflict(key: str, message: str) -> PydanticCustomError:
    """Two keys that do not go together; `key` is the one to blame."""
    return PydanticCustomError("conflict", "{message}", {"key": key, "message": message})


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


PRECISIONS: Mapping[str, tuple[str, int]] = {
    "fp32": ("float32", 1),
    "tf32": ("float32", 4),
    "bf16": ("bfloat16", 8),
    "fp16": ("float16", 8),
}
"""By precision: the dtype of activations, and how many neighbouring channels fill 16 bytes, which is what the loads of
tensor-core kernels take; 1 where none is used."""


AUTO_LAYOUT = "as shortest on cuda, nchw on cpu, on simulated nchw in fp32 and nhwc in tf32, bf16, fp16"
"""What memory.layout auto is, in words: every help text and the packaged configurations have these."""
LAYOUT_POLICIES = ("study", "shortest")
"""Values of memory.layout that give each layer a layout of its own on every device (see vdnn.memory.layout); "auto" is
"shortest" on a GPU."""


class NetworkConfig(Section):
    """Which network; further keys are options of its builder (see vdnn.networks)."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="the name of a network, such as lenet")

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the builder."""
        return dict(self.__pydantic_extra__ or {})


SOURCE_IDLE_KEYS = {
    "mnist": ("train_images", "test_images"),
    "idx": ("train_images", "test_images"),
    "synthetic": ("path",),
}
"""Which keys each source of data does not read."""


class DataConfig(Section):
    """Where images and labels come from (see vdnn.runtime.data)."""

    source: Literal["mnist", "idx", "synthetic"] = Field(default="synthetic", description="mnist, idx or synthetic")
    path: str | None = Field(
        default=None, min_length=1, description="a folder, or null for the packaged digits (mnist)"
    )
    train_images: Whole = Field(default=1280, ge=1, le=10**9, description="a whole number from 1 to 10^9")
    test_images: Whole = Field(default=256, ge=1, le=10**9, description="a whole number from 1 to 10^9")

    @model_validator(mode="after")
    def _folder(self) -> DataConfig:
        if self.source == "idx" and self.path is None:
            raise _conflict("path", "expected a folder with IDX files for source idx, got null")
        return self


class TrainConfig(Section):
    """How long and in which portions. Training ends at `epochs` or `iterations`, whichever comes first.

    `batch_size` is that of a whole step; `accumulate` cuts it into so many slices, run one after the other.
    """

    epochs: Whole | None = Field(default=12, ge=1, le=MOST_COUNT, description=f"{_COUNT}, or null")
    iterations: Whole | None = Field(default=None, ge=1, le=MOST_COUNT, description=f"{_COUNT}, or null")
    batch_size: Whole = Field(default=64, ge=1, le=MOST_COUNT, description=_COUNT)
    accumulate: Whole = Field(default=1, ge=1, le=MOST_COUNT, description=_COUNT)
    drop_last: bool = Field(default=False, description="true or false")
    seed: Whole = Field(default=0, ge=0, lt=2**63, description="a whole number from 0 to 2^63 - 1")

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.epochs is None and self.iterations is None:
            raise _conflict("epochs", "expected a number for epochs or iterations, got null for both")
        if self.accumulate > self.batch_size:
            raise _conflict("accumulate", f"expected at most batch_size = {self.batch_size}, got {self.accumulate}")
        return self


class OptimizerConfig(Section):
    """Stochastic gradient descent (see vdnn.layers.update)."""

    name: Literal["sgd"] = Field(default="sgd", description="sgd")
    lr: float = Field(default=0.05, gt=0, le=MOST_RATE, description="a number above 0, at most 1e38")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="a number from 0 up to, not including, 1")
    nesterov: bool = Field(default=False, description="true or false")
    weight_decay: float = Field(default=0.0005, ge=0, le=MOST_NUMBER, description="a number from 0 to 10^6")
    decay_bias_and_norm: bool = Field(default=True, description="true or false")

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.nesterov and not self.momentum:
            raise _conflict("nesterov", "expected false where momentum is 0, got true")
        return self


SCHEDULE_KEYS = {
    "constant": (),
    "step": ("step_epochs", "gamma"),
    "multistep": ("milestones", "gamma"),
    "cosine": ("min_lr",),
    "poly": ("power", "min_lr"),
}
"""Which keys each schedule reads, besides warmup_epochs."""


class ScheduleConfig(Section):
    """The learning rate over time (see vdnn.runtime.optim)."""

    name: Literal["constant", "step", "multistep", "cosine", "poly"] = Field(
        default="constant", description="constant, step, multistep, cosine or poly"
    )
    warmup_epochs: float = Field(default=0.0, ge=0, le=MOST_NUMBER, description="a number from 0 to 10^6")
    step_epochs: Whole = Field(default=30, ge=1, le=MOST_COUNT, description=_COUNT)
    gamma: float = Field(default=0.1, gt=0, le=1, description="a number above 0, at most 1")
    milestones: tuple[Annotated[float, Field(le=MOST_NUMBER)], ...] = Field(
        default=(), strict=False, description="a list of rising epoch numbers above 0, at most 10^6"
    )
    power: float = Field(default=1.0, gt=0, le=MOST_NUMBER, description="a number above 0, at most 10^6")
    min_lr: float = Field(default=0.0, ge=0, description="a number of 0 or more")

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleConfig:
        if any(b <= a for a, b in zip((0.0, *self.milestones), self.milestones, strict=False)):
            raise _conflict("milestones", f"expected rising epoch numbers above 0, got {list(self.milestones)}")
        if self.name == "multistep" and not self.milestones:
            raise _conflict("milestones", "expected at least one epoch number for schedule multistep, got none")
        return self


class MemoryConfig(Section):
    """The byte budget and how it is met (see vdnn.memory). A limit of null is what the device has."""

    policy: Literal["base", "none", "all", "conv", "dyn"] = Field(
        default="dyn", description="base, none, all, conv or dyn"
    )
    algorithms: Literal["memory-optimal", "performance-optimal"] = Field(
        default="performance-optimal", description="memory-optimal or performance-optimal"
    )
    limit: Bytes | None = Field(default=None, description=_BYTES)
    host_limit: Bytes | None = Field(default=None, description=_BYTES)
    workspace_limit: Bytes | None = Field(default=None, description=_BYTES)
    join: Literal["reuse", "layer"] = Field(default="reuse", description="reuse or layer")
    prefetch_limit: Bytes | None = Field(default=None, description=_BYTES)
    candidates: Literal["all", "named"] = Field(default="all", description="all or named")
    pool_indices: bool = Field(default=True, description="true or false")
    fuse: bool = Field(default=True, description="true or false")
    update: Literal["auto", "layer", "together"] = Field(default="auto", description="auto, layer or together")
    layout: Annotated[Literal["auto", "nchw", "nhwc", "chwn", "study", "shortest"], BeforeValidator(_lower)] = Field(
        default="auto", description="auto, nchw, nhwc, chwn, study or shortest"
    )
    layout_channels: Whole | None = Field(default=None, ge=1, le=MOST_COUNT, description=f"{_COUNT}, or null")
    layout_images: Whole | None = Field(default=None, ge=1, le=MOST_COUNT, description=f"{_COUNT}, or null")
    paper_search: bool = Field(default=False, description="true or false")
    slices: bool | None = Field(default=None, description="true, false, or null")


class EvaluateConfig(Section):
    """Evaluation on the test images; `batch_size: null` takes that of a training slice."""

    every_epochs: Whole = Field(
        default=1, ge=0, le=MOST_COUNT, description="a whole number from 0 (only at the end) to 10^12"
    )
    batch_size: Whole | None = Field(default=None, ge=1, le=MOST_COUNT, description=f"{_COUNT}, or null")


class CheckpointConfig(Section):
    """How often a checkpoint is written and how many are kept."""

    every_epochs: Whole = Field(
        default=1, ge=0, le=MOST_COUNT, description="a whole number from 0 (only at the end) to 10^12"
    )
    keep: Whole = Field(default=2, ge=1, le=MOST_COUNT, description=_COUNT)


class DebugConfig(Section):
    """Ways to find a fault in a plan or a backend: NaN in freed bytes, slow copies (cuda), streams in the worst order
    (cpu)."""

    poison: bool = Field(default=False, description="true or false")
    copy_repeats: Whole = Field(default=1, ge=1, le=100, description="a whole number from 1 to 100")
    stream_order: tuple[Literal["compute", "out", "in"], ...] | None = Field(
        default=None, strict=False, description="null, or the streams compute, out and in in order of preference"
    )

    @model_validator(mode="after")
    def _permutation(self) -> DebugConfig:
        if self.stream_order is not None and sorted(self.stream_order) != ["compute", "in", "out"]:
            raise _conflict("stream_order", f"expected compute, out and in once each, got {list(self.stream_order)}")
        return self


class Config(Section):
    """A whole run. `network` is the only section that must be given."""

    network: NetworkConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    debug: DebugConfig = DebugConfig()
    device: Literal["auto", "cpu", "cuda", "simulated"] = Field(
        default="auto", description="auto, cpu, cuda or simulated"
    )
    profile: str | None = Field(default=None, min_length=1, description="the name of a hardware profile, or null")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(default="fp32", description="fp32, tf32, bf16 or fp16")
    deterministic: bool = Field(default=False, description="true or false")
    output: str = Field(min_length=1, description="a folder for the run's files")

    @model_validator(mode="before")
    @classmethod
    def _default_output(cls, data: Any) -> Any:
        network = data.get("network") if isinstance(data, dict) else None
        if isinstance(network, dict) and "output" not in data:
            return {**data, "output": f"runs/{network.get('name')}"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.schedule.min_lr > self.optimizer.lr:
            message = f"expected at most optimizer.lr = {self.optimizer.lr:g}, got {self.schedule.min_lr:g}"
            raise _conflict("schedule.min_lr", message)
        if self.precision == "fp16" and self.memory.update == "layer":
            raise _conflict("memory.update", "expected auto or together for precision fp16, which skips whole steps")
        return self

    @property
    def update_together(self) -> bool | None:
        """Whether one op updates all weights at the end; None: where all fits with nothing offloaded."""
        if self.precision == "fp16":  # a step whose gradients are not finite must change no weight
            return True
        return {"auto": None, "layer": False, "together": True}[self.memory.update]

    @property
    def dtype(self) -> str:
        """Of activations and their gradients; all else is float32."""
        return PRECISIONS[self.precision][0]

    def layout_policy_on(self, device: str) -> str | None:
        """How layers get layouts of their own on "cpu", "cuda" or "simulated": "study", "shortest", or not at all.

        The algorithms and the search of the vDNN paper are those of one layout.
        """
        if self.memory.layout in LAYOUT_POLICIES:
            return self.memory.layout
        paper = self.memory.candidates == "named" or self.memory.paper_search
        return "shortest" if self.memory.layout == "auto" and device == "cuda" and not paper else None

    def layout_on(self, device: str) -> str:
        """ "NCHW", "NHWC" or "CHWN", of images and filters on "cpu", "cuda" or "simulated"; where layers get their own,
        of what has none.

        A simulated GPU gets NHWC by itself where tensor cores are used, for they read it as it lies; the cpu has none.
        """
        policy = self.layout_policy_on(device)
        if policy is None and self.memory.layout != "auto":
            return self.memory.layout.upper()
        if policy == "study" or (policy is not None and device != "cuda"):
            return "NCHW"
        return "NCHW" if self.precision == "fp32" or device == "cpu" else "NHWC"

    def pad_channels_on(self, device: str) -> int:
        """What the channels of the images are rounded up to a multiple of on `device`, in NHWC (see
        vdnn.layers.lower)."""
        may = self.layout_on(device) == "NHWC" or (device == "cuda" and self.layout_policy_on(device) == "shortest")
        return PRECISIONS[self.precision][1] if may else 1

    def dump(self) -> str:
        """All keys as YAML; `load_config` reads an equal Config from it."""
        return dump(self.model_dump(mode="json"))

    def unused(self) -> tuple[str, ...]:
        """One sentence for each key that was changed but that this run does not read: none is ignored in silence."""
        schedule, source = self.schedule.name, self.data.source
        idle: list[tuple[Section, str, str]] = [
            (self.schedule, f"schedule.{key}", f"schedule {schedule}")
            for key in dict.fromkeys(key for keys in SCHEDULE_KEYS.values() for key in keys)
            if key not in SCHEDULE_KEYS[schedule]
        ]
        if self.memory.layout != "study":
            reader = f"memory.layout {self.memory.layout}"
            idle += [(self.memory, f"memory.{key}", reader) for key in ("layout_channels", "layout_images")]
        idle += [(self.data, f"data.{key}", f"source {source}") for key in SOURCE_IDLE_KEYS[source]]
        return tuple(
            f"{key} is not read by {reader}"
            for section, key, reader in idle
            if getattr(section, field := key.split(".")[1]) != type(section).model_fields[field].default
        )


def load_config(path_or_name: str, overrides: Sequence[str] = (), texts: Mapping[str, str] | None = None) -> Config:
    """The Config in a file, or the packaged one of that name, with overrides; ConfigError where anything is wrong.

    Args:
        path_or_name: "lenet", or a path to a YAML file.
        overrides: "key.path=value" each, such as "optimizer.lr=1e-3"; later ones win.
        texts: text by key path, such as {"output": "run #3"}, taken as it is after the overrides.
    """
    data, places = read(path_or_name, overrides, texts)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, Config, places) from error
    try:
        build(config.network.name, **config.network.options)
    except ConfigError as error:  # the builder knows what it takes, not where it was written
        option = error.key or ""
        path = tuple(option.split(".")) if option in map(dotted, places) else ("network", "name")
        place = place_of(path, places)
        raise ConfigError(str(error), file=place.file, line=place.line, key=dotted(path)) from error
    return config
