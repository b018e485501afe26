"""Replicas on a Ray cluster: `tilewright serve --ray`. Ray Serve starts, replaces and counts them; one front speaks HTTP."""
