"""Training and serving one model on many devices. How it is divided is data, and results do not depend on it."""
