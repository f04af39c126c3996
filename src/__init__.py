"""vdnn trains convolutional networks that do not fit in GPU memory, on a budget stated in bytes.

vdnn-train lenet
vdnn plan vgg19 --batch-size 256 --policy all --profile titan-x-maxwell
"""

if __name__ != "vdnn":
    raise ImportError("this folder is the package vdnn: install vdnn (pip install -e .) and import that")

__version__ = "0.1.0"
