"""Recognizes modules outside all tables by their code or by the values that they compute."""
