"""Pooling and resizing of channels-last images."""
