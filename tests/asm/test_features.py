"""The capability flags of the installed Triton."""

import pytest
import triton

from tilewright.asm.features import features

# Read in the wheels. Another version skips: its flags are for whoever pins it to write down.
KNOWN = {
    "3.6.0": {"gluon", "bank_conflicts"},
    "3.7.1": {"gluon", "bank_conflicts", "clusters", "tma_multicast"},
    "3.9.0": {
        "gluon", "bank_conflicts", "clusters", "tma_multicast",
        "tma_im2col", "tma_reduce", "async_load_names", "cache_policies",
    },
}  # fmt: skip


def test_flags() -> None:
    if triton.__version__ not in KNOWN:
        pytest.skip(f"triton {triton.__version__} is not in the table")
    found = features()
    assert {name for name in vars(found) if getattr(found, name)} == KNOWN[triton.__version__]
