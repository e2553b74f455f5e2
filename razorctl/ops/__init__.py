"""Tensors in, tensors out: each file holds a plain reference, the registered op and its fake."""
