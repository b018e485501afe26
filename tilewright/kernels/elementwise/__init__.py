"""Operators that take every element, or pair of elements, by itself."""
