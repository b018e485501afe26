"""What Gluon kernels for Hopper are made of: primitives, the epilogue of a product, rows made by the kernel that reads them."""
