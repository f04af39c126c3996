"""Which bytes lowering shares, on small networks worked by hand, and what each part of a step does."""

from __future__ import annotations

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
    Pool,
    Program,
    Relu,
    SoftmaxLoss,
    Update,
    lower,
)


class Net(Graph):
    """A 4x6x6 network whose loose ends `lowered` joins into one loss."""

    def __init__(self) -> None:
        super().__init__("net", (4, 6, 6), classes=2)

    def conv(self, name: str, x: str = "data") -> str:
        return self.add(name, Conv(4, 1), x)

    def lowered(self, mode: str = "train") -> Program:
        loose = [t for t, consumers in self.consumers.items() if not consumers and self.shape(t)]
        for t in loose:
            self.add(f"loss_{t}", SoftmaxLoss(), self.add(f"fc_{t}", Linear(2), self.add(f"flat_{t}", Flatten(), t)))
        return lower(self, 2, mode)


def copies(program: Program) -> list[str]:
    return [op.name for op in program.ops if op.kind == "copy.forward"]


@pytest.mark.parametrize(
    ("below", "layer", "mode", "in_place"),
    [
        (Conv(4, 1), Relu(), "train", True),
        (BatchNorm(), Relu(), "train", True),
        (Pool("average", 2), Relu(), "train", True),
        (Pool("max", 2), Relu(), "train", False),  # backward of a maximum reads its y
        (Lrn(), Relu(), "train", False),
        (Relu(), Relu(), "train", False),
        (Relu(), Dropout(), "train", False),
        (Conv(4, 1), Dropout(), "train", True),
        (Dropout(), Relu(), "train", True),
        (Pool("max", 2), Relu(), "eval", True),  # no backward
        (Lrn(), Relu(), "eval", True),
        (Conv(4, 1), BatchNorm(), "train", False),  # backward reads its x
        (Conv(4, 1), BatchNorm(), "eval", True),
        (Conv(4, 1), Lrn(), "eval", False),  # never in place
        (Conv(4, 1), Pool("average", 1), "eval", False),
    ],
    ids=str,
)
def test_what_is_written_over_its_input(below: Layer, layer: Layer, mode: str, in_place: bool) -> None:
    net = Net()
    x = net.add("below", below, net.conv("stem"))
    net.add("layer", layer, x)
    program = net.lowered(mode)
    assert (program.storage("layer") == program.storage("below")) is in_place


def test_images_are_never_written_over() -> None:
    net = Net()
    net.add("relu", Relu(), net.input)
    assert net.lowered("eval").storage("relu") == "relu"


def test_a_tensor_used_twice_is_kept() -> None:
    net = Net()
    x = net.conv("x")
    net.add("relu", Relu(), x)
    net.conv("other", x)
    program = net.lowered()
    assert program.storage("relu") == "relu"
    # "other" comes first in backward and writes the gradient, the relu adds to it
    terms = [(op.name, op.accumulate) for op in program.ops if op.writes.get("dx") == "x.grad"]
    assert terms == [("other.dgrad", ()), ("relu.backward", ("dx",))]


def test_flatten_and_dropout_in_evaluation_are_names_only() -> None:
    net = Net()
    net.add("drop", Dropout(), net.add("flat", Flatten(), net.conv("x")))
    net.add("loss", SoftmaxLoss(), net.add("fc", Linear(2), "drop"))
    program = lower(net, 2, "eval")
    assert next(op for op in program.ops if op.name == "fc.forward").reads["x"] == "x"
    assert [op.name for op in program.ops] == ["data.normalize", "x.forward", "fc.forward", "loss.forward"]


def test_gradient_of_relu_and_dropout_lies_over_dy() -> None:
    net = Net()
    net.add("drop", Dropout(), net.add("relu", Relu(), net.conv("x")))
    program = net.lowered()
    assert program.storage("x.grad") == program.storage("relu.grad") == "drop.grad"


def test_sum_lies_over_its_first_term_only_where_it_may() -> None:
    net = Net()
    a, b = net.conv("a"), net.conv("b")
    net.add("sum", Add(), [a, b])  # over a
    c = net.conv("c")
    net.add("kept", Add(), [c, net.conv("d", c)])  # c is read by d too, but before: still not overwritten
    net.add("twice", Add(), [e := net.conv("e"), e])
    program = net.lowered()
    assert program.tensors["sum"].view_of == "a"
    assert program.tensors["kept"].view_of is None
    assert program.tensors["twice"].view_of is None


def test_terms_of_a_sum_share_one_gradient() -> None:
    net = Net()
    net.add("sum", Add(), [net.conv("a"), net.conv("b")])
    program = net.lowered()
    dys = {op.layer: op.reads["dy"] for op in program.ops if op.kind == "conv.wgrad"}
    assert dys == {"a": "sum.grad", "b": "sum.grad"}
    assert copies(program) == []


def test_terms_of_a_sum_do_not_share_where_one_would_see_a_write_to_the_other() -> None:
    net = Net()
    a = net.conv("a")
    net.conv("late", a)  # its backward adds to the gradient of a ...
    net.add("sum", Add(), [a, net.conv("b")])  # ... after that of b was read: b may share
    assert copies(net.lowered()) == []

    net = Net()
    a, b = net.conv("a"), net.conv("b")
    net.conv("late", a)  # now b is read after that
    net.add("sum", Add(), [a, b])
    program = net.lowered()
    assert copies(program) == ["sum.copy_grad1"]
    assert program.tensors["b.grad"].view_of is None

    net = Net()
    b = net.conv("b")
    relu = net.add("relu", Relu(), net.conv("a"))  # its backward writes over dy before b reads it
    net.add("sum", Add(), [relu, b])
    assert copies(net.lowered()) == ["sum.copy_grad1"]

    net = Net()
    a = net.conv("a")
    net.add("sum", Add(), [a, a])  # dy twice: shared once, added once
    program = net.lowered()
    assert copies(program) == ["sum.copy_grad1"]
    assert next(op for op in program.ops if op.name == "sum.copy_grad1").accumulate == ("y",)


def test_concatenation_is_made_in_place_and_nested_ones_too() -> None:
    net = Net()
    a = net.conv("a")
    b = net.add("b_relu", Relu(), net.conv("b"))
    inner = net.add("inner", Concat(), [a, b])
    outer = net.add("outer", Concat(), [net.conv("c"), inner])
    net.add("relu", Relu(), outer)
    program = net.lowered()
    places = {t: (program.storage(t), program.tensors[t].channel) for t in ("c", "a", "b", "b_relu", "inner", "outer")}
    assert places == {
        "c": ("outer", 0),
        "a": ("outer", 4),
        "b": ("outer", 8),
        "b_relu": ("outer", 8),
        "inner": ("outer", 4),
        "outer": ("outer", 0),
    }
    # b_relu's y is needed in backward, so the relu on the whole has bytes of its own
    assert program.storage("relu") == "relu"
    gradients = {t: (program.storage(t), program.tensors[t].channel) for t in ("c.grad", "a.grad", "b.grad")}
    assert gradients == {"c.grad": ("relu.grad", 0), "a.grad": ("relu.grad", 4), "b.grad": ("relu.grad", 8)}
    assert copies(program) == []


def test_concatenation_copies_what_is_claimed_elsewhere() -> None:
    net = Net()
    a, b = net.conv("a"), net.conv("b")
    net.add("first", Concat(), [a, b])
    net.add("second", Concat(), [b, b, net.input])
    program = net.lowered()
    places = {t: (program.storage(t), program.tensors[t].channel) for t in ("a", "b", "data")}
    assert places == {"a": ("first", 0), "b": ("first", 4), "data": ("data", 0)}
    forward = [op.name for op in program.ops if op.kind == "copy.forward" and op.phase == "forward"]
    assert forward == ["second.copy0", "second.copy1", "second.copy2"]
    # three terms reach the gradient of b, none the images
    terms = [(op.name, op.accumulate) for op in program.ops if op.writes.get("y") == "b.grad"]
    assert terms == [("second.copy_grad0", ()), ("second.copy_grad1", ("y",)), ("first.copy_grad1", ("y",))]


# ---- updates and accumulated steps


def test_modes_accumulate_and_update() -> None:
    net = Net()
    net.conv("a")
    update = Update(momentum=0.9, weight_decay=1e-4, decay_bias_and_norm=False)
    net.lowered()
    for mode, adds, updates in (
        ("train", False, True),
        ("first", False, False),
        ("middle", True, False),
        ("last", True, True),
    ):
        program = lower(net, 2, mode, update=update)
        ops = {op.name: op for op in program.ops}
        assert ops["a.wgrad"].accumulate == (("dw",) if adds else ())
        assert ops["a.bgrad"].accumulate == (("db",) if adds else ())
        assert ("a.weight.grad" in program.persistent) is (mode != "train")
        assert "a.weight.momentum" in program.persistent
        decays = {
            name: op.attrs["weight_decay"] for name, op in ops.items() if op.layer == "a" and op.phase == "update"
        }
        assert decays == ({"a.weight.update": 1e-4, "a.bias.update": 0.0} if updates else {})


def test_one_op_updates_all_weights_last() -> None:
    net = Net()
    net.conv("a")
    update = Update(momentum=0.9, nesterov=True, weight_decay=1e-4, decay_bias_and_norm=False)
    net.lowered()
    for mode in ("first", "middle", "eval"):
        assert not [op for op in lower(net, 2, mode, update=update, update_together=True).ops if op.phase == "update"]
    for mode in ("train", "last"):
        program = lower(net, 2, mode, update=update, update_together=True)
        apart = [op for op in lower(net, 2, mode, update=update).ops if op.kind == "sgd.update"]
        assert [op.name for op in program.ops if op.phase == "update"] == ["update"]
        op = program.ops[-1]
        assert (op.kind, op.layer) == ("sgd.update_all", "loss_a")
        names = range(len(apart))
        assert op.reads == {"step": "step"} | {f"dw{i}": apart[i].reads["dw"] for i in names}
        assert {f"w{i}": apart[i].writes["w"] for i in names}.items() <= op.writes.items()
        assert {f"v{i}": apart[i].writes["v"] for i in names}.items() <= op.writes.items()
        assert op.writes["status"] == "step"
        assert len(op.writes) == 2 * len(apart) + 1 == len(op.accumulate)
        decays = [one.attrs["weight_decay"] for one in apart]
        assert op.attrs == {"momentum": 0.9, "nesterov": True, "weight_decay": decays}
        assert 0.0 in decays
        assert 1e-4 in decays
    plain = lower(net, 2, update_together=True).ops[-1]
    assert not [argument for argument in plain.writes if argument.startswith("v")]
