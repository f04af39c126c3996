"""A run of vdnn-train that takes a second: LeNet on synthetic images.

ended = train(tmp_path, *SMALL, "--epochs", 1, "--output", "run")
"""

from __future__ import annotations

from pathlib import Path

from scripts import Ended, script

SECTIONS = (
    "network={name: lenet, dropout: 0.5}",
    "data={source: synthetic, train_images: 100, test_images: 20}",
    "train={epochs: 2, batch_size: 6}",
    "optimizer={lr: 0.01}",
    "schedule={name: cosine}",
    "memory={limit: 64MiB}",
)
SMALL = ("lenet", *(word for section in SECTIONS for word in ("-o", section)))
"""17 steps an epoch, the last with 4 images."""


def train(cwd: Path, *arguments: object) -> Ended:
    """`vdnn-train` with these arguments, to its end."""
    return script("vdnn-train", *arguments, cwd=cwd)
