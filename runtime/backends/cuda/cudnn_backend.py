"""Descriptors of cuDNN's graph ("backend") API: typed attributes set, finalized and read.

    tensor = BackendDescriptor(api, Kind.TENSOR)
    tensor.set(Attribute.TENSOR_UNIQUE_ID, Type.INT64, 1)
    tensor.finalize()

Numbers are those of cudnn_graph.h; a test compares them with the header of the installed wheel. With DeviceProperties
in place of a handle cuDNN lists plans for a GPU that is not there (cuDNN 9.11 to 9.26 without a driver).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from vdnn.runtime.backends.cuda.cudnn import Cudnn


class Kind(IntEnum):
    """CUDNN_BACKEND_<name>_DESCRIPTOR."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    DEVICEPROP = 38


class Type(IntEnum):
    """CUDNN_TYPE_<name>."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    BACKEND_DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    INT32 = 23
    CHAR = 24


class Attribute(IntEnum):
    """CUDNN_ATTR_<name>."""

    POINTWISE_MODE = 0
    POINTWISE_MATH_PREC = 1
    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_JSON_REPRESENTATION = 405
    EXECUTION_PLAN_DEVICEPROP = 407
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATION_CONVOLUTION_FORWARD_ALPHA = 700
    OPERATION_CONVOLUTION_FORWARD_BETA = 701
    OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702
    OPERATION_CONVOLUTION_FORWARD_W = 703
    OPERATION_CONVOLUTION_FORWARD_X = 704
    OPERATION_CONVOLUTION_FORWARD_Y = 705
    OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706
    OPERATION_CONVOLUTION_BWD_DATA_BETA = 707
    OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708
    OPERATION_CONVOLUTION_BWD_DATA_W = 709
    OPERATION_CONVOLUTION_BWD_DATA_DX = 710
    OPERATION_CONVOLUTION_BWD_DATA_DY = 711
    OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712
    OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713
    OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714
    OPERATION_CONVOLUTION_BWD_FILTER_DW = 715
    OPERATION_CONVOLUTION_BWD_FILTER_X = 716
    OPERATION_CONVOLUTION_BWD_FILTER_DY = 717
    OPERATION_POINTWISE_PW_DESCRIPTOR = 750
    OPERATION_POINTWISE_XDESC = 751
    OPERATION_POINTWISE_BDESC = 752
    OPERATION_POINTWISE_YDESC = 753
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    TENSOR_IS_VIRTUAL = 907
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_BEHAVIOR_NOTE = 1305
    ENGINE_DEVICEPROP = 1307
    DEVICEPROP_DEVICE_ID = 2700
    DEVICEPROP_JSON_REPRESENTATION = 2702


# every other type is a C enumeration
_CTYPES: Mapping[Type, Any] = {
    Type.BOOLEAN: ctypes.c_bool,
    Type.INT64: ctypes.c_int64,
    Type.INT32: ctypes.c_int32,
    Type.FLOAT: ctypes.c_float,
    Type.HANDLE: ctypes.c_void_p,
    Type.VOID_PTR: ctypes.c_void_p,
    Type.BACKEND_DESCRIPTOR: ctypes.c_void_p,
}


class BackendDescriptor:
    """One cudnnBackendDescriptor_t, destroyed with this object; it keeps alive what it refers to.

    `about` says in error texts what it is part of.
    """

    def __init__(self, api: Cudnn, kind: Kind, about: str = ""):
        self.api, self.kind, self.about = api, kind, about
        self._children: list[BackendDescriptor] = []
        self.pointer = api.create(self, "cudnnBackendCreateDescriptor", "cudnnBackendDestroyDescriptor", kind)

    def set(self, attribute: Attribute, type_: Type, *values: Any) -> BackendDescriptor:
        """Give the attribute these values: numbers, addresses or other descriptors."""
        self._children += [value for value in values if isinstance(value, BackendDescriptor)]
        plain = [value.pointer if isinstance(value, BackendDescriptor) else value for value in values]
        array = (_CTYPES.get(type_, ctypes.c_int) * len(plain))(*plain)
        self._call("cudnnBackendSetAttribute", attribute, type_, len(plain), array, name=attribute.name)
        return self

    def set_text(self, attribute: Attribute, text: str) -> BackendDescriptor:
        """Give the attribute these characters."""
        data = text.encode()
        self._call("cudnnBackendSetAttribute", attribute, Type.CHAR, len(data), data, name=attribute.name)
        return self

    def finalize(self) -> BackendDescriptor:
        """Have cuDNN check it; its attributes are fixed from here on."""
        self._call("cudnnBackendFinalize")
        return self

    def count(self, attribute: Attribute, type_: Type) -> int:
        """How many values the attribute has."""
        count = ctypes.c_int64()
        arguments = (attribute, type_, 0, ctypes.byref(count), None)
        self._call("cudnnBackendGetAttribute", *arguments, name=attribute.name)
        return count.value

    def get(self, attribute: Attribute, type_: Type, limit: int = 1) -> list[int]:
        """Values of the attribute, `limit` at most."""
        array, count = (_CTYPES.get(type_, ctypes.c_int) * limit)(), ctypes.c_int64()
        arguments = (attribute, type_, limit, ctypes.byref(count), array)
        self._call("cudnnBackendGetAttribute", *arguments, name=attribute.name)
        return list(array[: min(limit, count.value)])

    def get_text(self, attribute: Attribute) -> str:
        """Characters of the attribute."""
        size, count = self.count(attribute, Type.CHAR), ctypes.c_int64()
        data = ctypes.create_string_buffer(size)
        arguments = (attribute, Type.CHAR, size, ctypes.byref(count), data)
        self._call("cudnnBackendGetAttribute", *arguments, name=attribute.name)
        return data.raw[: count.value].decode()

    def get_descriptors(self, attribute: Attribute, kind: Kind, limit: int) -> list[BackendDescriptor]:
        """Descriptors that the attribute refers to, `limit` at most."""
        # cuDNN fills descriptors that the caller made
        found = [BackendDescriptor(self.api, kind, self.about) for _ in range(limit)]
        array, count = (ctypes.c_void_p * limit)(*(child.pointer for child in found)), ctypes.c_int64()
        arguments = (attribute, Type.BACKEND_DESCRIPTOR, limit, ctypes.byref(count), array)
        self._call("cudnnBackendGetAttribute", *arguments, name=attribute.name)
        for child in found:
            child._children.append(self)
        return found[: count.value]

    def _call(self, function: str, *args: Any, name: str = "") -> None:
        words = ", ".join(part for part in (self.about, self.kind.name, name) if part)
        self.api.call(function, self.pointer, *args, about=words)


class DeviceProperties:
    """What cuDNN needs to know of a GPU: asked from device number `device`, or read from `json`, cuDNN's own text."""

    def __init__(self, api: Cudnn, *, json: str | None = None, device: int = 0):
        self.api = api
        self.descriptor = BackendDescriptor(api, Kind.DEVICEPROP, "device properties")
        if json is None:
            self.descriptor.set(Attribute.DEVICEPROP_DEVICE_ID, Type.INT32, device)
        else:
            self.descriptor.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, json)
        self.descriptor.finalize()

    def to_json(self) -> str:
        """The JSON text from which equal properties can be made anywhere."""
        return self.descriptor.get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)
