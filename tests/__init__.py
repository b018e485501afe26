"""Tests. Imported before numpy, which the interpreter of kernels multiplies with.

OpenBLAS has kernels (Haswell's, which Zen takes too) where the bits of a row depend on its place among the others. On a GPU
they do not, and tests compare them.
"""

import os
import platform

if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"  # whatever the machine would take, or was told to
