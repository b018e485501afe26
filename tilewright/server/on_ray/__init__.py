"""Replicas on a Ray cluster: `tilewright serve --ray`. Ray Serve starts and replaces them and changes their number. One front
process serves HTTP."""
