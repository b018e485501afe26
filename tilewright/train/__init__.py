"""Training on the models and kernels that serve."""
