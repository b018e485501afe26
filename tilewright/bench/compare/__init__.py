"""The proof that a model became faster, layer by layer, than an engine whose layers cannot be called one by one."""
