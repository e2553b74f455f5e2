"""What files and names of settings have in common; no torch."""
