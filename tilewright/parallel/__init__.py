"""Training and serving one model on many devices. A plan (plan.py) describes how the work is divided; it
changes the results at most by rounding."""
