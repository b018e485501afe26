"""`optimize`: runs a user's torch.nn model on the operators of this package, fused and replayed as one CUDA graph."""

from tilewright.fuse.anchors import READERS, Anchor, read
from tilewright.fuse.decisions import Decision
from tilewright.fuse.optimize import optimize
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.partial import Partial
from tilewright.fuse.report import Report
from tilewright.fuse.saved import load_optimized
from tilewright.fuse.trace import Untraceable

__all__ = [
    "READERS",
    "Anchor",
    "Decision",
    "Optimized",
    "Partial",
    "Report",
    "Untraceable",
    "load_optimized",
    "optimize",
    "read",
]
