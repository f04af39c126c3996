"""One small training step of LeNet and of ResNet-18 on the GPU, uncaptured: something to run under compute-sanitizer.

compute-sanitizer --tool memcheck python -m vdnn.bench.gpu_sanitize
"""

from __future__ import annotations

import sys

from vdnn.bench.command import command
from vdnn.bench.harness import train

CASES = {
    "lenet": ["train.batch_size=4"],
    "resnet18": ["train.batch_size=2", "network.image_size=32", "network.classes=10"],
}


def main() -> None:
    """Two steps of each under policy all, so that copies are in it."""
    for name, overrides in CASES.items():
        fixed = ["device=cuda", "memory.limit=null", "memory.policy=all", "memory.algorithms=memory-optimal"]
        fixed += ["memory.layout=nchw"]  # else convolutions are measured in every layout, which takes minutes here
        sizes = ["data.source=synthetic", "data.train_images=8", "data.test_images=2", "evaluate.batch_size=2"]
        outcome = train(name, [*fixed, *sizes, *overrides], 2, capture=False)
        print(name, outcome.losses)


if __name__ == "__main__":
    sys.exit(command(main))
