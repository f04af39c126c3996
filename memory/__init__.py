"""Planning: what is live when, where it lies, when it moves, and an independent check of the result."""

if __name__ != "vdnn.memory":
    raise ImportError("this folder is the package vdnn.memory: install vdnn (pip install -e .) and import vdnn.memory")
