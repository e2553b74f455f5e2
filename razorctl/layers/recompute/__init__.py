"""Code and blocks that run a second time in the backward pass, from stored inputs."""
