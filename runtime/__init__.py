"""Running a plan: configuration, backends, executor, training, data, checkpoints."""

if __name__ != "vdnn.runtime":
    raise ImportError(
        "this folder is the package vdnn.runtime: install vdnn (pip install -e .) and import vdnn.runtime"
    )
