"""Matrix products with an epilogue: `linear`, its implementations, and code that other kinds of products share with it."""
