"""Code and blocks that are recomputed in the backward pass from stored inputs."""
