"""Products of 16-bit activations with quantised weights of 8 and 4 bits."""
