"""What a backward pass keeps and what it computes again: measured by operation, planned for a budget, applied to blocks."""

from tilewright.train.recompute.apply import applied
from tilewright.train.recompute.plan import Choice, Plan, full, none, pareto, planned, selective
from tilewright.train.recompute.profile import BlockProfile, Call, Profile, profile

__all__ = [
    "BlockProfile",
    "Call",
    "Choice",
    "Plan",
    "Profile",
    "applied",
    "full",
    "none",
    "pareto",
    "planned",
    "profile",
    "selective",
]
