"""Tasks and rewards, and the worker processes that compute rewards within limits of time and memory."""
