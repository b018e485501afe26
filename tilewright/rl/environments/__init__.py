"""Tasks and their rewards, and the worker processes in which rewards are bounded."""
