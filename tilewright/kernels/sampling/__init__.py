"""From logits to a token: edits, sampling, log-probabilities."""
