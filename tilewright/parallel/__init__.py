"""One model on many devices: how it is cut is data, and what is computed does not depend on it."""
