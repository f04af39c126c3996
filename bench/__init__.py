"""Studies: comparisons with papers and peers; results with machine facts lie in results/."""

if __name__ != "vdnn.bench":
    raise ImportError("this folder is the package vdnn.bench: install vdnn (pip install -e .) and import vdnn.bench")
