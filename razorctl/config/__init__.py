"""Reading and checking settings, presets and names, without torch."""
