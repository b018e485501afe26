"""`tilewright compare`: proves, layer by layer, that a model is faster than in an engine whose layers cannot be called
alone."""
