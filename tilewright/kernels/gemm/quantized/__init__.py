"""Products of two quantised matrices: with scales per row, per block, or in MX formats, and with requantised results."""
