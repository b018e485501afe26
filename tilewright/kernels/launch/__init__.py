"""The host side of launches: shapes, replays, counters, overlap, gradients, and the cost of a launch. No kernels."""
