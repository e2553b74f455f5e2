"""Predictions of finished runs for the rows of files: a module for each kind of answer."""
