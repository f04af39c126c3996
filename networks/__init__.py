"""The networks: pure Graph builders, one file a family."""

if __name__ != "vdnn.networks":
    raise ImportError("this folder is the package vdnn.networks: install vdnn (pip install -e .) and import vdnn.networks")
