"""Configuration files: what is read, what is refused and with which line, and that a dump reads back as it was."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vdnn.errors import ConfigError, ShapeError
from vdnn.networks import NETWORKS, build
from vdnn.runtime.config import Config, load_config, packaged_configs
from vdnn.runtime.yaml_lines import dump, parse

PLAIN = "network: {name: lenet}\n"


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refusal(path_or_name: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path_or_name, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("-2", -2),
        ("010", 10),
        ("1.5E+2", 150.0),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("12 GB", "12 GB"),
        ("1__0", "1__0"),
        ("!!float 3", 3.0),
    ],
)
def test_a_scalar_is_what_a_person_means(text, value):
    read = parse(f"key: {text}", "file")[0]["key"]
    assert read == value
    assert type(read) is type(value)


def test_every_key_and_item_has_its_line():
    _, lines = parse("# comment\na:\n  b: 1\n  c: [1,\n     2]\n", "file")
    assert lines[("a",)] == 2
    assert lines[("a", "b")] == 3
    assert lines[("a", "c", 1)] == 5


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
WORDS = st.sampled_from(["1e-3", "yes", "1_000", ".5", "010", "~", "null", "true", ".inf", "12 GB", "-", "1.", ""])


@settings(deadline=None)
@given(
    st.recursive(SCALARS | WORDS, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5) | WORDS, s))
)
def test_what_is_dumped_reads_back_equal(value):
    assert parse(dump(value), "file")[0] == value


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("train: {epochs: 1}\n" + PLAIN + "train: {epochs: 2}\n", 3, "'train' is given twice, first on line 1"),
        (PLAIN + "train:\n  epochs: 1\n  epochs: 1\n", 4, "'train.epochs' is given twice, first on line 3"),
        (PLAIN + "train: &a {epochs: 1}\nevaluate: *a\n", None, "alias"),
        (PLAIN + "1: x\n", 2, "a word as key, got 1"),
        (PLAIN + "? [a]\n: 1\n", 2, "a word as key, got a list"),
        (PLAIN + "train: !!python/object:os.system x\n", 2, "plain text or a number"),
        (PLAIN + "train: !!python/dict {epochs: 1}\n", 2, "a tag (tag:yaml.org,2002:python/dict) is not supported"),
        (PLAIN + "train: !mine {epochs: 1}\n", 2, "a tag (!mine) is not supported"),
        (PLAIN + "schedule: {milestones: !!python/tuple [1]}\n", 2, "python/tuple) is not supported"),
        (PLAIN + "schedule: {milestones: !!set {1}}\n", 2, "is not supported"),
        (PLAIN + "---\n" + PLAIN, 2, "not valid YAML"),
        (PLAIN + "\ttrain: 1\n", 2, "not valid YAML"),
        (PLAIN + "train: [1\n", 3, "not valid YAML"),
        (PLAIN + "train: {seed: " + "9" * 5000 + "}\n", 2, "usual size"),
        ("[" * 5000, None, "nested too deep"),
        ("", None, "the file is empty"),
        ("# only a comment\n", None, "the file is empty"),
        ("- network\n", 1, "expected keys with values, got a list"),
        ("lenet\n", 1, "expected keys with values, got 'lenet'"),
        (bytes(range(256)), None, "expected UTF-8, got byte 0x80 at offset 128"),
        (b"\x7fELF\x00\x01\x02", None, "not a text file"),
        (b"x" * (2**20 + 1), None, "longer than 1048576 bytes"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, text, line, words):
    error = refusal(write(tmp_path, text))
    assert words in str(error)
    assert str(error).startswith(error.file)
    if line:
        assert error.line == line
        assert f"run.yaml:{line}: " in str(error)


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        (
            "train:\n  batchsize: 3\n",
            3,
            "train.batchsize",
            "unknown key 'train.batchsize' (did you mean 'batch_size'?)",
        ),
        ("trian: {}\n", 2, "trian", "unknown key 'trian' (did you mean 'train'?)"),
        ("train: {lr: 0.1}\n", 2, "train.lr", "it is a key of optimizer"),
        ("train: {zzz: 0.1}\n", 2, "train.zzz", "expected one of epochs, iterations, batch_size"),
        ("train:\n  batch_size: 0\n", 3, "train.batch_size", "expected a whole number from 1 to 10^12, got 0"),
        ("train:\n  batch_size: '64'\n", 3, "train.batch_size", "got '64'"),
        ("train:\n  batch_size: 1.5\n", 3, "train.batch_size", "got 1.5"),
        ("train:\n  batch_size: true\n", 3, "train.batch_size", "got true"),
        ("train:\n  batch_size:\n", 3, "train.batch_size", "got null"),
        ("train:\n  epochs: [1]\n", 3, "train.epochs", "got a list of 1"),
        ("train:\n  drop_last: yes\n", 3, "train.drop_last", "expected true or false, got 'yes'"),
        ("train:\n  seed: -1\n", 3, "train.seed", "expected a whole number from 0 to 2^63 - 1, got -1"),
        ("train:\n", 2, "train", "expected keys with values (epochs, iterations"),
        ("train:\n  batch_size: 4\n  accumulate: 5\n", 4, "train.accumulate", "at most batch_size = 4, got 5"),
        ("train:\n  epochs: null\n", 3, "train.epochs", "null for both"),
        ("optimizer:\n  lr: -1e-3\n", 3, "optimizer.lr", "expected a number above 0, at most 1e38, got -0.001"),
        ("optimizer:\n  lr: .inf\n", 3, "optimizer.lr", "expected a number above 0, at most 1e38, got inf"),
        ("optimizer:\n  lr: fast\n", 3, "optimizer.lr", "got 'fast'"),
        ("optimizer:\n  lr: 1e39\n", 3, "optimizer.lr", "at most 1e38, got 1e+39"),
        ("optimizer:\n  weight_decay: 1e300\n", 3, "optimizer.weight_decay", "a number from 0 to 10^6"),
        ("train:\n  epochs: " + "9" * 400 + "\n", 3, "train.epochs", "from 1 to 10^12, or null, got 9999"),
        ("train:\n  batch_size: 1e300\n", 3, "train.batch_size", "from 1 to 10^12"),
        ("evaluate:\n  every_epochs: 1e13\n", 3, "evaluate.every_epochs", "to 10^12"),
        ("schedule:\n  warmup_epochs: 1e308\n", 3, "schedule.warmup_epochs", "a number from 0 to 10^6, got 1e+308"),
        ("schedule:\n  gamma: 1e300\n", 3, "schedule.gamma", "a number above 0, at most 1, got 1e+300"),
        ("schedule:\n  power: 1e300\n", 3, "schedule.power", "a number above 0, at most 10^6"),
        ("schedule:\n  milestones: [1, 1e300]\n", 3, "schedule.milestones.1", "at most 10^6, got 1e+300"),
        ("memory:\n  limit: 1e300\n", 3, "memory.limit", "an amount of bytes"),
        ("optimizer:\n  name: adam\n", 3, "optimizer.name", "expected sgd, got 'adam'"),
        ("optimizer:\n  momentum: 1\n", 3, "optimizer.momentum", "up to, not including, 1"),
        ("optimizer:\n  momentum: 0\n  nesterov: true\n", 4, "optimizer.nesterov", "where momentum is 0"),
        ("schedule:\n  name: linear\n", 3, "schedule.name", "constant, step, multistep, cosine or poly"),
        ("schedule:\n  milestones: [1,\n    x]\n", 4, "schedule.milestones.1", "got 'x'"),
        ("schedule:\n  milestones: [3, 2]\n", 3, "schedule.milestones", "rising"),
        ("schedule:\n  name: multistep\n", 2, "schedule.milestones", "at least one"),
        ("schedule:\n  min_lr: 1\n", 3, "schedule.min_lr", "at most optimizer.lr = 0.05, got 1"),
        ("memory:\n  limit: 12 parsecs\n", 3, "memory.limit", "12GiB, 12 GB or 12000000000, or null, got '12 parsecs'"),
        ("memory:\n  limit: -1\n", 3, "memory.limit", "got -1"),
        ("memory:\n  limit: [1]\n", 3, "memory.limit", "got a list of 1"),
        ("memory:\n  limit: true\n", 3, "memory.limit", "got true"),
        ("memory:\n  pool_indices: 1\n", 3, "memory.pool_indices", "expected true or false, got 1"),
        ("memory:\n  policy: some\n", 3, "memory.policy", "base, none, all, conv or dyn"),
        ("memory:\n  fuse: 1\n", 3, "memory.fuse", "expected true or false, got 1"),
        ("memory:\n  update: once\n", 3, "memory.update", "auto, layer or together"),
        ("precision: fp16\nmemory:\n  update: layer\n", 4, "memory.update", "expected auto or together"),
        ("data:\n  source: idx\n", 2, "data.path", "expected a folder"),
        ("data: {source: imagenet}\n", 2, "data.source", "mnist, idx or synthetic"),
        ("checkpoint: {keep: 0}\n", 2, "checkpoint.keep", "from 1 to"),
        ("device: gpu\n", 2, "device", "auto, cpu, cuda or simulated, got 'gpu'"),
        ("precision: fp64\n", 2, "precision", "expected fp32, tf32, bf16 or fp16, got 'fp64'"),
        (
            "memory: {layout: hwcn}\n",
            2,
            "memory.layout",
            "expected auto, nchw, nhwc, chwn, study or shortest, got 'hwcn'",
        ),
        ("output: ''\n", 2, "output", "a folder"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_line_and_key(tmp_path, text, line, key, words):
    error = refusal(write(tmp_path, PLAIN + text))
    assert words in str(error)
    assert (error.line, error.key) == (line, key)
    assert str(error).startswith(f"{error.file}:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("train: {}\n", 1, "missing key 'network'"),
        ("train: {}\nnetwork: lenet\n", 2, "network: expected keys with values (name), got 'lenet'"),
        ("network:\n  dropout: 0.1\n", 1, "missing key 'network.name': expected the name of a network"),
        ("network:\n  name: 3\n", 2, "expected the name of a network, such as lenet, got 3"),
        ("network:\n  name: lenett\n", 2, "(did you mean 'lenet'?)"),
        ("network:\n  name: lenet\n  drop: 0.1\n", 3, "(did you mean 'dropout'?)"),
        ("network:\n  name: lenet\n  dropout: half\n", 3, "dropout"),
    ],
)
def test_a_wrong_network_is_named_with_its_line(tmp_path, text, line, words):
    error = refusal(write(tmp_path, text))
    assert words in str(error)
    assert error.line == line


def test_an_option_that_makes_no_network_is_an_error_of_the_layer(tmp_path):
    with pytest.raises(ShapeError, match="layer 'drop3'"):
        load_config(write(tmp_path, "network: {name: lenet, dropout: 2}"))


@pytest.mark.parametrize(("text", "expected"), [("12GiB", 12 * 2**30), ("12 GB", 12 * 10**9), ("12e9", 12 * 10**9)])
def test_bytes_in_three_spellings(tmp_path, text, expected):
    assert load_config(write(tmp_path, f"{PLAIN}memory: {{limit: {text}}}")).memory.limit == expected
    assert load_config("lenet", [f"memory.limit={text}"]).memory.limit == expected


def test_numbers_that_yaml_itself_would_misread(tmp_path):
    text = f"{PLAIN}optimizer: {{lr: 1e-3, weight_decay: .5}}\ntrain: {{batch_size: 1e2, iterations: 1_000}}"
    assert yaml.safe_load(text)["optimizer"]["lr"] == "1e-3"  # what this test is about
    config = load_config(write(tmp_path, text))
    assert config.optimizer.lr == 0.001
    assert config.optimizer.weight_decay == 0.5
    assert (config.train.batch_size, config.train.iterations) == (100, 1000)


def test_defaults(tmp_path):
    config = load_config(write(tmp_path, PLAIN))
    assert config.network.options == {}
    assert (config.data.source, config.memory.policy, config.device) == ("synthetic", "dyn", "auto")
    assert (config.train.epochs, config.train.batch_size, config.train.seed) == (12, 64, 0)
    assert (config.optimizer.lr, config.optimizer.momentum, config.optimizer.weight_decay) == (0.05, 0.9, 0.0005)
    assert config.output == "runs/lenet"


def test_overrides_apply_in_order_and_create_sections(tmp_path):
    path = write(tmp_path, PLAIN + "train: {epochs: 3}\n")
    config = load_config(
        path, ["train.epochs=4", "train.epochs=5", "network.dropout=0", "optimizer={lr: 1}", "output=x"]
    )
    assert (config.train.epochs, config.optimizer.lr, config.output) == (5, 1.0, "x")
    assert config.network.options == {"dropout": 0}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("train..lr=3", "expected key.path=value"),
        ("train.epochs.x=3", "train.epochs has no keys of its own"),
        ("train.epochs=[1", "not valid YAML"),
        ("train={epochs: 1, epochs: 2}", "given twice"),
        ("train.batchsize=3", "(did you mean 'batch_size'?)"),
        ("train.batch_size=0", "-o train.batch_size=0: train.batch_size: expected a whole number from 1 to 10^12"),
        ("foo.bar=1", "-o foo.bar=1: unknown key 'foo'"),
        ("train.foo.bar=1", "-o train.foo.bar=1: unknown key 'train.foo'"),
        ("memory={limt: 1}", "-o memory={limt: 1}: unknown key 'memory.limt'"),
        ("network.name.first=1", "network.name has no keys of its own"),
        ("network.name=lenett", "(did you mean 'lenet'?)"),
    ],
)
def test_a_wrong_override_is_named(override, words):
    assert words in str(refusal("lenet", override))


@pytest.mark.parametrize(
    ("given_name", "words"),
    [
        ("lenett", "no configuration named 'lenett' (did you mean 'lenet'?)"),
        ("qqqqqq", "expected a path, or one of alexnet, cifar10"),
        ("lenet.yaml", "no such file 'lenet.yaml': the packaged configuration is called 'lenet'"),
        ("nowhere/run.yaml", "no such file 'nowhere/run.yaml'"),
        ("a\0b.yaml", "is no path: it has a NUL character"),
    ],
)
def test_a_configuration_that_is_not_there(given_name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in str(refusal(given_name))


def test_a_folder_and_an_unreadable_file_are_no_configuration(tmp_path):
    assert "Is a directory" in str(refusal(str(tmp_path)))
    if os.geteuid():  # root reads everything
        path = write(tmp_path, PLAIN)
        os.chmod(path, 0)
        assert "Permission denied" in str(refusal(path))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_every_network_has_a_configuration_that_reads_back_from_its_dump(name, tmp_path):
    assert name in packaged_configs()
    config = load_config(name)
    assert config.network.name == name
    assert config.output == f"runs/{name}"
    assert config.unused() == ()
    assert build(name, **config.network.options).name.startswith(name[:3])
    assert load_config(write(tmp_path, config.dump())) == config


def test_the_batches_and_limits_of_the_vdnn_paper():
    batches = {"alexnet": 128, "overfeat": 128, "googlenet": 128, "vgg19": 256, "vgg116": 32, "vgg216": 32}
    for name, batch in {**batches, "vgg316": 32, "vgg416": 32}.items():
        config = load_config(name)
        assert (config.train.batch_size, config.memory.limit) == (batch, 12 * 2**30), name


def test_lenet_shows_every_key():
    text = Path(str(load_config.__globals__["__file__"])).parent.parent.joinpath("configs/lenet.yaml").read_text()
    for name, field in Config.model_fields.items():
        assert f"{name}:" in text
        for key in getattr(field.annotation, "model_fields", ()):
            if (name, key) not in (("data", "train_images"), ("data", "test_images")):
                assert f"{key}:" in text, (name, key)


def test_keys_that_are_not_read_are_told(tmp_path):
    text = "schedule: {name: cosine, gamma: 0.2, warmup_epochs: 1}\ndata: {source: mnist, train_images: 5}\n"
    assert load_config(write(tmp_path, PLAIN + text)).unused() == (
        "schedule.gamma is not read by schedule cosine",
        "data.train_images is not read by source mnist",
    )


def test_a_config_cannot_be_changed():
    config = load_config("lenet")
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 3


COUNTS = st.integers(1, 10**9)
RATES = st.floats(1e-12, 1e6, allow_subnormal=False)


@settings(max_examples=60, deadline=None)
@given(
    train=st.fixed_dictionaries(
        {"epochs": COUNTS | st.none(), "iterations": COUNTS, "batch_size": COUNTS, "seed": st.integers(0, 2**63 - 1)}
    ),
    lr=RATES,
    limit=st.integers(0, 2**50) | st.sampled_from([2**30, 12 * 2**30, 3 * 2**20]) | st.none(),
    milestones=st.lists(st.floats(0.1, 1e4), unique=True).map(sorted),
    output=st.text(min_size=1, max_size=10) | st.sampled_from(["1e-3", "yes", "~", "1_0", "true"]),
)
def test_any_valid_config_reads_back_from_its_dump(tmp_path_factory, train, lr, limit, milestones, output):
    config = Config.model_validate(
        {
            "network": {"name": "lenet", "dropout": 0.25},
            "train": train,
            "optimizer": {"lr": lr},
            "memory": {"limit": limit, "workspace_limit": 0},
            "schedule": {"milestones": milestones},
            "output": output,
        }
    )
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(config.dump(), encoding="utf-8")
    assert load_config(str(path)) == config


LENET = Path(str(load_config.__globals__["__file__"])).parent.parent.joinpath("configs/lenet.yaml").read_bytes()


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, len(LENET)),
    cut=st.integers(0, 40),
    new=st.binary(max_size=6) | st.text("{}[]:-&*!#'\"\n \t~1e", max_size=6),
)
def test_a_damaged_file_is_refused_or_read_but_never_crashes(tmp_path_factory, at, cut, new):
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(LENET[:at] + (new if isinstance(new, bytes) else new.encode()) + LENET[at + cut :])
    with contextlib.suppress(ConfigError, ShapeError):  # any other error is a crash
        assert isinstance(load_config(str(path)), Config)
