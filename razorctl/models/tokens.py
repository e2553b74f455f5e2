"""Placeholder."""

from typing import Any


def causal(*a: Any) -> Any: ...


def masked(*a: Any) -> Any: ...


def packed(*a: Any) -> Any: ...


def conversations(*a: Any) -> Any: ...
