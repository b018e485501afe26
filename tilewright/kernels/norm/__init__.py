"""RMS norm and layer norm over the last dimension, and their gradients."""
