"""Copies that several layers read: who offers them, who finds them, and what they derive."""
