"""Data: IDX files against files written here byte by byte, every way in which they can be wrong, order and batches."""

from __future__ import annotations

import gzip
import os
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vdnn.errors import ConfigError, DataError
from vdnn.runtime.config import DataConfig
from vdnn.runtime.data import open_source
from vdnn.runtime.data import synthetic as made_up
from vdnn.runtime.data.hashing import words

MNIST = (1, 28, 28)
CODES = {"uint8": 0x08, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D}


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def mnist_folder(folder: Path, train: int = 6, test: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x, y = images(train, 28, 28), np.arange(train).astype(np.uint8) % 10
    (folder / "train-images-idx3-ubyte").write_bytes(idx(x))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(y))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images(test, 28, 28, seed=1)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(test, np.uint8)))
    return x, y


def open_mnist(folder: Path, shape: tuple[int, int, int] = MNIST, classes: int = 10):
    return open_source(DataConfig(source="mnist", path=str(folder)), shape, classes, 0)


def refusal(folder: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        open_mnist(folder, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is read


def test_the_packaged_digits_are_read_as_the_files_say():
    source = open_source(DataConfig(source="mnist"), MNIST, 10, 0)
    assert (len(source.train), len(source.test)) == (4000, 1000)
    assert "MNIST" in source.description
    assert "synthetic" not in source.description
    folder = Path(str(open_source.__globals__["__file__"])).parent / "mnist5k"
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(4000, 1, 28, 28)
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    chosen = np.array([3999, 0, 17])
    assert np.array_equal(source.train.images(chosen), pixels[chosen])
    assert source.train.labels(chosen).tolist() == [labels[i] for i in chosen]
    assert source.train.images(chosen).dtype == np.uint8
    assert source.train.labels(chosen).dtype == np.int32
    assert min(Counter(source.test.labels(np.arange(1000)).tolist()).values()) > 80  # all ten digits
    assert source.mean == pytest.approx([(pixels / 255).mean()], rel=1e-12)
    assert source.std == pytest.approx([(pixels / 255).std()], rel=1e-12)


def test_the_packaged_digits_name_their_authors_and_licence():
    text = (Path(str(open_source.__globals__["__file__"])).parent / "mnist5k" / "ATTRIBUTION.md").read_text()
    for words_ in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", "4,000", "1,000"):
        assert words_ in text


@pytest.mark.parametrize("compressed", [(), (0, 3), (0, 1, 2, 3)])
def test_a_folder_of_mnist_files_plain_or_compressed(tmp_path, compressed):
    x, y = mnist_folder(tmp_path)
    for path in np.array(sorted(tmp_path.iterdir()))[list(compressed)]:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    source = open_mnist(tmp_path)
    assert np.array_equal(source.train.images(np.arange(6)), x[:, None])
    assert source.train.labels(np.arange(6)).tolist() == y.tolist()
    assert len(source.test) == 4


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize(("shape", "stored"), [((3, 5, 4), (3, 5, 4)), ((1, 5, 4), (5, 4))])
def test_images_of_any_shape_under_plain_names(tmp_path, shape, stored, dtype):
    x = {"train": images(7, *stored), "test": images(3, *stored, seed=1)}
    top = 255 if dtype == "uint8" else 999
    y = {"train": np.array([0, top, 2, 3, 4, 5, 6], dtype), "test": np.array([1, 1, top], dtype)}
    for split in x:
        (tmp_path / f"{split}-images.idx").write_bytes(idx(x[split]))
        (tmp_path / f"{split}-labels.idx.gz").write_bytes(gzip.compress(idx(y[split])))
    source = open_source(DataConfig(source="idx", path=str(tmp_path)), shape, top + 1, 0)
    order = np.array([6, 1, 1])
    assert np.array_equal(source.train.images(order), x["train"].reshape(7, *shape)[order])
    assert source.train.labels(order).tolist() == [6, top, top]
    assert np.array_equal(source.test.images(np.arange(3)), x["test"].reshape(3, *shape))
    pixels = x["train"].reshape(7, *shape) / 255
    assert source.mean == pytest.approx(pixels.mean((0, 2, 3)))
    assert source.std == pytest.approx(pixels.std((0, 2, 3)))
    assert str(tmp_path) in source.description


def test_a_channel_of_one_value_has_a_deviation_to_divide_by(tmp_path):
    mnist_folder(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.full((6, 28, 28), 51, np.uint8)))
    source = open_mnist(tmp_path)
    assert source.mean == pytest.approx((0.2,))
    assert source.std == (1 / 255,)


# ---- what is refused

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "content", "words_"),
    [
        (
            TRAIN_IMAGES,
            b"",
            "expected an IDX header (two zero bytes, a type of uint8, 3 or 4 dimensions), got bytes (none)",
        ),
        (TRAIN_IMAGES, b"\x00\x00", "got bytes 00 00"),
        (TRAIN_IMAGES, b"\x89PNG\r\n\x1a\n" * 9, "got bytes 89 50 4e 47"),
        (TRAIN_IMAGES, idx(np.zeros((6, 28, 28), np.float32)), "got bytes 00 00 0d 03"),
        (TRAIN_IMAGES, idx(np.zeros(6, np.uint8)), "got bytes 00 00 08 01"),
        (TRAIN_LABELS, idx(images(6, 28, 28)), "1 dimensions), got bytes 00 00 08 03"),
        (TRAIN_LABELS, idx(np.zeros(6, np.float32)), "got bytes 00 00 0d 01"),
        (TRAIN_IMAGES, idx(images(6, 28, 28))[:9], "expected 3 sizes of 4 bytes in the header, got 5 bytes"),
        (TRAIN_IMAGES, idx(images(6, 28, 28))[:-1], "expected 4,704 bytes after the header, got 4,703"),
        (TRAIN_IMAGES, idx(images(6, 28, 28)) + b"\x00", "expected 4,704 bytes after the header, got 4,705"),
        (TRAIN_IMAGES, struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "bytes after the header, got 0"),
        (TRAIN_IMAGES, struct.pack(">BBBB3I", 0, 0, 8, 3, 0, 28, 28), "expected sizes of 1 or more, got (0, 28, 28)"),
        (
            TRAIN_IMAGES,
            idx(images(6, 32, 32)),
            "network takes images of shape (C, H, W) = (1, 28, 28), the file holds (1, 32, 32)",
        ),
        (
            TRAIN_LABELS,
            idx(np.zeros(5, np.uint8)),
            "expected 6 labels, one for each image in train-images-idx3-ubyte, got 5",
        ),
        (TRAIN_LABELS, idx(np.array([0, 1, 2, 10, 4, 11], np.uint8)), "labels from 0 to 9, got 10 for image 3"),
        (TRAIN_LABELS, idx(np.array([0, 1, 2, 3, -1, 5], np.int16)), "labels from 0 to 9, got -1 for image 4"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected_and_found(tmp_path, name, content, words_):
    mnist_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path)
    assert f"'{tmp_path / name}'" in message
    assert words_ in message
    # compressed, the same file is refused in the same words, but for the length beyond the end
    (tmp_path / name).unlink()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert words_.replace("got 4,705", "got 4,705 or more") in refusal(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-4],
        lambda raw: raw[:200] + bytes([raw[200] ^ 0xFF]) + raw[201:],
        lambda raw: raw[:-8] + b"\x00\x00\x00\x00" + raw[-4:],
        lambda raw: b"not gzip at all",
        lambda raw: raw[:3],
    ],
    ids=["half", "no length", "flipped byte", "wrong checksum", "other file", "three bytes"],
)
def test_broken_compression_is_named(tmp_path, damage):
    mnist_folder(tmp_path)
    plain = tmp_path / TRAIN_IMAGES
    broken = tmp_path / f"{TRAIN_IMAGES}.gz"
    broken.write_bytes(damage(gzip.compress(plain.read_bytes())))
    plain.unlink()
    assert f"'{broken}': expected intact gzip data" in refusal(tmp_path)


def test_an_empty_compressed_file_is_named(tmp_path):
    mnist_folder(tmp_path)
    (tmp_path / TRAIN_IMAGES).unlink()
    (tmp_path / f"{TRAIN_IMAGES}.gz").write_bytes(b"")
    assert f"{TRAIN_IMAGES}.gz': expected an IDX header" in refusal(tmp_path)


def test_missing_files_and_folders_are_named(tmp_path):
    assert f"'{tmp_path}': expected a file train-images-idx3-ubyte or train-images-idx3-ubyte.gz" in refusal(tmp_path)
    mnist_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert "expected a file t10k-labels-idx1-ubyte or" in refusal(tmp_path)
    assert "expected a folder, got nothing" in refusal(tmp_path / "nowhere")
    assert "expected a folder, got a file" in refusal(tmp_path / TRAIN_IMAGES)
    (tmp_path / "t10k-labels-idx1-ubyte").mkdir()
    assert "t10k-labels-idx1-ubyte' cannot be read: Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize("name", [TRAIN_IMAGES, f"{TRAIN_LABELS}.gz"])
def test_a_pipe_is_no_data_file(tmp_path, name):
    mnist_folder(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    os.mkfifo(tmp_path / name)
    assert f"{name}': expected a regular file" in refusal(tmp_path)


def test_a_folder_of_nobody_is_refused():
    with pytest.raises(ConfigError, match="there is no such user"):
        open_mnist(Path("~nosuchuser/digits"))


def test_digits_do_not_fit_another_network():
    with pytest.raises(DataError, match=r"\(C, H, W\) = \(3, 224, 224\), the file holds \(1, 28, 28\)"):
        open_source(DataConfig(source="mnist"), (3, 224, 224), 1000, 0)
    with pytest.raises(DataError, match=r"labels from 0 to 4, got .*: set network.classes"):
        open_source(DataConfig(source="mnist"), MNIST, 5, 0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path):
    mnist_folder(tmp_path)
    (tmp_path / TRAIN_LABELS).chmod(0)
    assert f"{TRAIN_LABELS}' cannot be read: Permission denied" in refusal(tmp_path)


# ---- synthetic images


def synthetic(shape=(3, 20, 16), classes=10, seed=0, train=1000, test=500):
    return open_source(DataConfig(train_images=train, test_images=test), shape, classes, seed)


def test_synthetic_images_say_so_and_depend_on_seed_split_and_index_alone():
    a, b = synthetic(), synthetic()
    assert "synthetic" in a.description
    assert (len(a.train), len(a.test)) == (1000, 500)
    some = np.array([7, 999, 7])
    x = a.train.images(some)
    assert x.shape == (3, 3, 20, 16)
    assert x.dtype == np.uint8
    assert np.array_equal(x[0], x[2])
    assert np.array_equal(x[:2], b.train.images(np.array([7, 999])))
    assert not np.array_equal(x[0], a.test.images(some[:1])[0])
    assert not np.array_equal(x, synthetic(seed=1).train.images(some))
    train, test = a.train.labels(np.arange(500)), a.test.labels(np.arange(500))
    assert not np.array_equal(train, test)
    alike = np.flatnonzero(train == test)[:1]
    assert not np.array_equal(a.train.images(alike), a.test.images(alike))  # the noise is of the split, too


def test_synthetic_labels_cover_all_classes_evenly():
    labels = synthetic(train=10**6).train.labels(np.arange(100_000))
    counts = np.bincount(labels, minlength=10)
    assert labels.dtype == np.int32
    assert counts.min() > 9_600  # 10,000 expected, four standard deviations of 95 either way
    assert counts.max() < 10_400


def test_synthetic_pixels_have_the_stated_mean_and_deviation():
    source = synthetic(shape=(2, 28, 28), classes=50)
    pixels = source.train.images(np.arange(1000)) / 255
    assert pixels.mean((0, 2, 3)) == pytest.approx(source.mean, abs=0.02)
    assert pixels.std((0, 2, 3)) == pytest.approx(source.std, abs=0.02)


def test_synthetic_classes_can_be_told_apart_and_patterns_hold_for_the_test_images():
    source = synthetic(shape=(1, 28, 28))
    x, y = source.train.images(np.arange(1000)) / 255, source.train.labels(np.arange(1000))
    centres = np.stack([x[y == label].mean(0) for label in range(10)])
    test = source.test.images(np.arange(500)) / 255
    distance = ((test[:, None] - centres[None]) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == source.test.labels(np.arange(500))).mean() > 0.99


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 5), (3, 224, 224)])
def test_synthetic_images_of_any_size_without_holding_them(shape):
    source = synthetic(shape=shape, classes=1000, train=10**9)
    start = time.perf_counter()
    x = source.train.images(np.array([0, 10**9 - 1]))
    assert x.shape == (2, *shape)
    assert time.perf_counter() - start < 1  # 10^9 images of 150 kB are drawn one at a time


@pytest.mark.parametrize("kept_bytes", [0, 2**28])
def test_synthetic_images_are_the_same_whether_kept_or_drawn_again(monkeypatch, kept_bytes):
    monkeypatch.setattr(made_up, "KEPT_BYTES", kept_bytes)
    split, alone = synthetic().train, synthetic(train=10**6).train  # too many to be kept
    order = np.random.default_rng(0).integers(0, 1000, 200)
    expected = alone.images(order)
    for _ in range(2):
        np.testing.assert_array_equal(split.images(order), expected)
    split.images(order)[:] = 0  # what was handed out is the caller's
    np.testing.assert_array_equal(split.images(order[:7]), expected[:7])


def test_synthetic_images_are_drawn_by_many_threads_at_once():
    split, alone = synthetic().train, synthetic(train=10**6).train
    parts = np.random.default_rng(1).integers(0, 1000, (40, 25))
    with ThreadPoolExecutor(8) as threads:
        for part, found in zip(parts, threads.map(split.images, parts), strict=True):
            np.testing.assert_array_equal(found, alone.images(part))


def test_synthetic_noise_is_the_raw_words_of_philox():
    x = synthetic(shape=(1, 5, 3), classes=3).train
    index = np.array([123])
    key = words(0, made_up._TRAIN + made_up._NOISE, index)[0]
    noise = np.random.Philox(key=int(key)).random_raw(2).view(np.uint8)[:15] >> 1
    pattern = x.images(index).ravel() - noise
    for other in range(200):  # what is left is the pattern of the class alone
        if x.labels(np.array([other]))[0] == x.labels(index)[0]:
            own = words(0, made_up._TRAIN + made_up._NOISE, np.array([other]))[0]
            more = np.random.Philox(key=int(own)).random_raw(2).view(np.uint8)[:15] >> 1
            np.testing.assert_array_equal(x.images(np.array([other])).ravel() - more, pattern)
