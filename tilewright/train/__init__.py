"""The trainer: pretraining, fine-tuning, preferences and optimizers, on the same models and kernels that serve."""
