"""Example arguments of the ops of several wings, from their dimensions."""
