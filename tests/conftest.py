"""Settings of the whole suite; read before NumPy is."""

import os

# on two busy cores two BLAS threads spend most of their time waiting for each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
