"""One run: its steps, its directory and its checkpoints; runs compared, and a finished one used."""
