"""Which columns of activations and which parameter blocks get a gradient."""
