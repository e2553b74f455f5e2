"""Modules that no table lists, known by their code or by the values that they compute."""
