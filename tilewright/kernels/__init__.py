"""The kernels, by family. docs/tour.md says what is where.

launch/ (host), device/ (Triton functions) and hopper/ (Gluon) are what all of them stand on. A wing has one file per operation,
each in the same order: docstring, reference, cost, space, examples, kernels, launchers, function.
"""
