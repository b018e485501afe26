"""Tuning: the configs of kernels, measuring them, the database of measurements, and choosing from it at run time."""
