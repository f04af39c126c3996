"""Studies: comparisons with papers and peers; results with machine facts lie in results/."""

import sys

if __name__ != "vdnn.bench":
    raise ImportError("this folder is the package vdnn.bench: install vdnn (pip install -e .) and import vdnn.bench")

from vdnn.runtime.signals import stop_while_loading

# `python -m vdnn.bench.NAME` loads its libraries before vdnn.bench.command can catch anything
if sys.argv[:1] == ["-m"]:
    stop_while_loading(next((word.rpartition(".")[2] for word in sys.orig_argv if "vdnn.bench." in word), "vdnn.bench"))
