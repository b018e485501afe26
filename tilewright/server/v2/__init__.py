"""Serves ordinary models over the Open Inference Protocol, version 2, and over plain JSON."""
