"""The commands: one file each."""

if __name__ != "vdnn.cli":
    raise ImportError("this folder is the package vdnn.cli: install vdnn (pip install -e .) and import that")
