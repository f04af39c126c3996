"""NVIDIA GPUs: convolutions by cuDNN, matrix products by cuBLAS, everything else by kernels of our own.

    from vdnn.runtime.backends.cuda.kernels import CUDA_KERNELS, KernelSet

CuPy is imported where it is used only: every module here can be imported on a machine without a GPU.
"""

if __name__ != "vdnn.runtime.backends.cuda":
    raise ImportError("this folder is the package vdnn.runtime.backends.cuda: install vdnn (pip install -e .)")
