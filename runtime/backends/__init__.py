"""The machines that plans run on: one folder each, all behind vdnn.runtime.backend.Backend."""

if __name__ != "vdnn.runtime.backends":
    raise ImportError(
        "this folder is the package vdnn.runtime.backends: install vdnn (pip install -e .) and import that"
    )
