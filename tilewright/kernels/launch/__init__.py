"""The host's side of a launch: shapes, replays, counters, overlap, gradients, and what a launch costs. No kernels."""
