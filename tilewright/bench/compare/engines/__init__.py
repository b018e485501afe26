"""Engines as black boxes, one file each; `tilewright.bench.compare.engine` has the protocol and the table of names."""
