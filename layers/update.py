"""The optimiser as ops: an update op for every weight as soon as its gradient is complete, or one for all at the end.

    Updates(Update(momentum=0.9), together=True)

Both compute the same bits. One op for all is faster, and changes all weights or, where some gradient is not finite,
none; an op for every weight frees its gradient at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vdnn.layers.graph import Node
    from vdnn.layers.lower import Lowering

STEP = "step"
"""The tensor of what changes from step to step (see vdnn.runtime.step): learning rate, counters, gradient scale."""
STEP_BYTES = 64


@dataclass(frozen=True, slots=True)
class Update:
    """The optimiser as constants of the update ops: SGD with momentum (Sutskever et al. 2013, as torch.optim.SGD).

    g = dw * unscale + weight_decay * w;  v = momentum * v + g;  w -= lr * (g + momentum * v if nesterov else v)
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_bias_and_norm: bool = True


class Updates:
    """Emits the update ops of one program.

    Args:
        together: whether `finish` emits one op for all weights, in place of one for each.
    """

    def __init__(self, update: Update, together: bool):
        self.update, self._together = update, together
        self._waiting: list[tuple[str, float]] = []  # weights and their decays, in the order of backward

    def add(self, low: Lowering, node: Node, suffix: str) -> None:
        """The gradient of this parameter of `node` is complete."""
        parameter = next(p for p in low.graph.parameters(node) if p.suffix == suffix)
        decays = parameter.decay or self.update.decay_bias_and_norm
        weight, decay = low.parameter(node, suffix), self.update.weight_decay if decays else 0.0
        if self._together:
            self._waiting.append((weight, decay))
            return
        writes = {"w": weight}
        if self.update.momentum:
            writes["v"] = f"{weight}.momentum"
        low.emit(
            node,
            "sgd.update",
            {"dw": f"{weight}.grad", "step": STEP},
            {**writes, "status": STEP},
            attrs=self._attrs(decay),
            accumulate=(*writes, "status"),
            phase="update",
            name=f"{weight}.update",
        )

    def finish(self, low: Lowering) -> None:
        """Emit the update of what waits, if anything does: number i has the arguments dw<i>, w<i> and v<i>."""
        if not self._waiting:
            return
        gradients, writes = {}, {}
        for i, (weight, _) in enumerate(self._waiting):
            gradients[f"dw{i}"], writes[f"w{i}"] = f"{weight}.grad", weight
            if self.update.momentum:
                writes[f"v{i}"] = f"{weight}.momentum"
        low.emit(
            low.head,
            "sgd.update_all",
            {"step": STEP, **gradients},
            {**writes, "status": STEP},
            attrs=self._attrs([decay for _, decay in self._waiting]),
            accumulate=(*writes, "status"),
            phase="update",
            name="update",
        )

    def _attrs(self, decay: float | list[float]) -> dict[str, object]:
        update = self.update
        return {"momentum": update.momentum, "nesterov": update.nesterov, "weight_decay": decay}
