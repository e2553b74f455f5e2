"""The draws of the columns of activations and of the parameter blocks that get a gradient."""
