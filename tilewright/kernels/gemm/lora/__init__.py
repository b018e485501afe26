"""Low-rank adapters (LoRA) for many tokens at once, each with its own adapter: `shrink` to the rank, `expand` back."""
