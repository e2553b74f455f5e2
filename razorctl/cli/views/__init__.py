"""The output of each command."""
