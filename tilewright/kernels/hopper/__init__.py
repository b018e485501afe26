"""Components of Gluon kernels for Hopper: primitives, pipelines, tile schedules, epilogues, and rows that a kernel produces."""
