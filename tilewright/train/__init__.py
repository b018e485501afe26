"""The trainer: pretraining, fine-tuning, preference learning and optimizers. It uses the same models and kernels as serving."""
