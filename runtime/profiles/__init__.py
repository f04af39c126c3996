"""Hardware profiles: one YAML file a machine, read by vdnn.runtime.profile."""

if __name__ != "vdnn.runtime.profiles":
    raise ImportError(
        "this folder is the package vdnn.runtime.profiles: install vdnn (pip install -e .) and import that"
    )
