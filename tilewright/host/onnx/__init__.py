"""ONNX files as modules of torch. The library `onnx` reads and checks them, brings them to one opset, and computes shapes."""
