"""Activation recomputation: profiles what the backward pass needs, plans what to keep within a memory budget, and applies the
plan to the blocks of a model."""

from tilewright.train.recompute.apply import applied
from tilewright.train.recompute.card import seconds_on
from tilewright.train.recompute.decoder import decoder_profile
from tilewright.train.recompute.plan import Choice, Plan, full, none, pareto, planned, selective
from tilewright.train.recompute.profile import BlockProfile, Call, Profile, profile
from tilewright.train.recompute.reasons import Reason, reasons

__all__ = [
    "BlockProfile",
    "Call",
    "Choice",
    "Plan",
    "Profile",
    "Reason",
    "applied",
    "decoder_profile",
    "full",
    "none",
    "pareto",
    "planned",
    "profile",
    "reasons",
    "seconds_on",
    "selective",
]
