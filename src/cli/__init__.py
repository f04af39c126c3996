"""The commands: one file each."""

import sys
from pathlib import Path

if __name__ != "vdnn.cli":
    raise ImportError("this folder is the package vdnn.cli: install vdnn (pip install -e .) and import that")

from vdnn.runtime.signals import stop_while_loading

PROGRAMS = ("vdnn", "vdnn-train")

# the libraries take half a second to load, before a command can catch anything itself
if sys.argv and Path(sys.argv[0]).name in PROGRAMS:
    stop_while_loading(Path(sys.argv[0]).name)
