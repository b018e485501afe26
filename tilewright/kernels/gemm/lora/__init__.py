"""Low-rank adapters of many tokens at once, each with its own: `shrink` to the rank, `expand` back."""
