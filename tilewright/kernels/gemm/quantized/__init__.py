"""Products of two quantised matrices: scales by row, by block, MX, and results that are quantised again."""
