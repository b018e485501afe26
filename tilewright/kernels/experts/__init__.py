"""Mixtures of experts around their products: which experts a token goes to, the order of rows by expert, the way back."""
