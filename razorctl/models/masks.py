"""Placeholder."""

from typing import Any


def transform(config: Any) -> Any: ...


def augmented(config: Any, augment: str) -> Any: ...
