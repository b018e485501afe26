"""Tasks and rewards, and the worker processes in which rewards are computed with limits on time and memory."""
