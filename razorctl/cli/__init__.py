"""The command line: parses, calls and shows."""
