"""The gradient of convolution by its weight."""
