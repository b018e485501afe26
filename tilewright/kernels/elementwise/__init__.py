"""Operators that process each element, or each pair of elements, independently."""
