"""How an activation is packed between the forward and the backward pass."""
