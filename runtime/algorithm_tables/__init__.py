"""Stored tables of measured convolution algorithms: one JSON file a GPU and precision (see algorithm_table.py)."""

if __name__ != "vdnn.runtime.algorithm_tables":
    raise ImportError(
        "this folder is the package vdnn.runtime.algorithm_tables: install vdnn (pip install -e .) and import that"
    )
