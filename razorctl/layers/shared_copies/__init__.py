"""Copies that several layers read: the memo that shares them, and their layouts."""
