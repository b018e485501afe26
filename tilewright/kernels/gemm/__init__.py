"""Matrix products with their epilogue: `linear`, its implementations, and what products of other operands share with it."""
