"""Training runs: steps, directories and checkpoints; runs compared, and the models of runs used."""
