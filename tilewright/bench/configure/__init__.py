"""The best configuration of a service for a model, a machine and an objective: predicted first, then measured."""
