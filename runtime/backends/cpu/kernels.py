"""One kernel for each op kind.

    KERNELS[op.kind](op, **arrays)

A kernel takes the arrays of its op's reads and writes by argument name, and writes into the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vdnn.runtime.backends.cpu.batchnorm import (
    batchnorm_backward,
    batchnorm_forward,
    batchnorm_inference,
    batchnorm_update_stats,
    batchnorm_update_stats_all,
)
from vdnn.runtime.backends.cpu.conv import conv_bgrad, conv_dgrad, conv_forward, conv_wgrad
from vdnn.runtime.backends.cpu.copy import (
    add_forward,
    copy_forward,
    filter_prepare,
    filter_prepare_all,
    input_normalize,
)
from vdnn.runtime.backends.cpu.dropout import dropout_backward, dropout_forward
from vdnn.runtime.backends.cpu.linear import linear_bgrad, linear_dgrad, linear_forward, linear_wgrad
from vdnn.runtime.backends.cpu.lrn import lrn_backward, lrn_forward
from vdnn.runtime.backends.cpu.pool import pool_backward, pool_forward
from vdnn.runtime.backends.cpu.relu import relu_backward, relu_bias_backward, relu_forward
from vdnn.runtime.backends.cpu.sgd import sgd_update, sgd_update_all
from vdnn.runtime.backends.cpu.softmax_loss import (
    softmax_forward,
    softmax_loss_backward,
    softmax_loss_forward,
    softmax_loss_train,
)

KERNELS: Mapping[str, Callable[..., None]] = {
    "input.normalize": input_normalize,
    "conv.forward": conv_forward,
    "conv.wgrad": conv_wgrad,
    "conv.dgrad": conv_dgrad,
    "conv.bgrad": conv_bgrad,
    "pool.forward": pool_forward,
    "pool.backward": pool_backward,
    "relu.forward": relu_forward,
    "relu.backward": relu_backward,
    "relu.bias_backward": relu_bias_backward,
    "lrn.forward": lrn_forward,
    "lrn.backward": lrn_backward,
    "linear.forward": linear_forward,
    "linear.wgrad": linear_wgrad,
    "linear.dgrad": linear_dgrad,
    "linear.bgrad": linear_bgrad,
    "batchnorm.forward": batchnorm_forward,
    "batchnorm.inference": batchnorm_inference,
    "batchnorm.update_stats": batchnorm_update_stats,
    "batchnorm.update_stats_all": batchnorm_update_stats_all,
    "batchnorm.backward": batchnorm_backward,
    "dropout.forward": dropout_forward,
    "dropout.backward": dropout_backward,
    "add.forward": add_forward,
    "copy.forward": copy_forward,
    "layout.transform": copy_forward,
    "filter.prepare": filter_prepare,
    "filter.prepare_all": filter_prepare_all,
    "softmax.forward": softmax_forward,
    "softmax_loss.forward": softmax_loss_forward,
    "softmax_loss.backward": softmax_loss_backward,
    "softmax_loss.train": softmax_loss_train,
    "sgd.update": sgd_update,
    "sgd.update_all": sgd_update_all,
}
