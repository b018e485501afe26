"""Multi-head latent attention over a paged cache."""
