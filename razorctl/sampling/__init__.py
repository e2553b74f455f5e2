"""Which coordinates get a gradient."""
