"""Converts ONNX files to modules of torch. The library `onnx` checks them, converts them to one opset, and infers shapes."""
