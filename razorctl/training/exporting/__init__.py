"""A finished run for other tools: its files, ONNX, and a repository of the hub."""
