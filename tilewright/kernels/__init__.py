"""One file per operation, each in the same order: docstring, reference, cost, space, examples, kernels, launchers, function."""
