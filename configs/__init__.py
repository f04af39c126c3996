"""One documented YAML file per run; `vdnn-train NAME` finds them by name."""

if __name__ != "vdnn.configs":
    raise ImportError(
        "this folder is the package vdnn.configs: install vdnn (pip install -e .) and import vdnn.configs"
    )
