"""The forwards of stock classes that razor classes were written for.

A razor class that reimplements a forward computes what the stock forward computed at that time. So
the test `tests/layers/test_known_forwards.py --write-forwards` stores fingerprints of stock sources
in `known_forwards.json`. A fingerprint is a hash of the syntax of the forward, and of the methods
and functions of its file that it calls, without annotations, docstrings and names of variables.
"""

import ast
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

from razorctl.system import documents

FILE = Path(__file__).with_name("known_forwards.json")
F_ATTENTION: Any = F.multi_head_attention_forward  # a razor class reimplements it
IGNORED: dict[str, Any] = {"annotation": None, "decorator_list": [], "returns": None}
BY_PYTHON = r"\w+=\[\]|ctx=Load\(\)|[\s,]"  # parts of `ast.dump` that depend on Python's version


def is_known(kind: type[nn.Module]) -> bool:
    """Whether the file has the fingerprint of a class under its name."""
    return name_of(kind) in alike(kind)


def alike(kind: type[nn.Module]) -> set[str]:
    """The classes in the file that have the fingerprint of this class."""
    own = fingerprint(kind)
    return {name for name, prints in _table().items() if own in prints}


def changed(kinds: Iterable[type[nn.Module]]) -> list[str]:
    """The classes in the file whose forward now has another fingerprint, with their releases."""
    unlike = [k for k in dict.fromkeys(kinds) if name_of(k) in _table() and not is_known(k)]
    return [f"{kind.__name__} ({release(kind)})" for kind in unlike]


def name_of(kind: type[nn.Module]) -> str:
    """The name of a class in the file."""
    return f"{kind.__module__}.{kind.__qualname__}"


def release(kind: type[nn.Module]) -> str:
    """The library of a class and its version, as "timm 1.0.15"."""
    library = kind.__module__.partition(".")[0]
    return f"{library} {sys.modules[library].__version__.partition('+')[0]}"


def fingerprint(kind: type[nn.Module]) -> str | None:
    """The fingerprint of the current forward of a class; None without its source."""
    sources = []
    try:
        functions = list(_methods(kind, "forward"))
        for function in functions:  # the list grows in the loop
            syntax, names = _source(function.__code__)
            sources.append(syntax)
            called = [each for name in names for each in _called(kind, function, name)]
            functions += [each for each in dict.fromkeys(called) if each not in functions]
    except (AttributeError, OSError, SyntaxError, TypeError):
        return None
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]


def forward_names(kind: type[nn.Module]) -> frozenset[str]:
    """The names of globals and attributes in the forward of a class."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def _called(kind: type[nn.Module], function: FunctionType, name: str) -> Iterator[Any]:
    """The methods, or the function in the same file, that a name in a function refers to."""
    yield from _methods(kind, name)
    value = F_ATTENTION if name == F_ATTENTION.__name__ else function.__globals__.get(name)
    same_file = getattr(value, "__globals__", None) is function.__globals__
    if value is F_ATTENTION or (same_file and isinstance(value, FunctionType)):
        yield value


def _methods(kind: type[nn.Module], name: str) -> Iterator[Any]:
    """A method or property of a class, and the ones that it calls by `super`."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        method: Any = vars(base).get(name)
        method = getattr(method, "fget", getattr(method, "__func__", method))
        library = base.__module__.partition(".")[0]
        while hasattr(method, "__wrapped__") and method.__globals__["__name__"].startswith(library):
            method = method.__wrapped__  # its own decorators
        if isinstance(method, FunctionType) or (name == "forward" and method is not None):
            yield method
            if "super" not in method.__code__.co_names:
                return


@cache
def _source(code: CodeType) -> tuple[str, list[str]]:
    """The syntax of a function, and the names of its attributes and globals, each once."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    nodes: list[Any] = list(ast.walk(tree))
    used = [node for node in nodes if isinstance(node, ast.Name)]
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
    targets = [node.id for node in used if isinstance(node.ctx, ast.Store)]
    numbers = {name: str(at) for at, name in enumerate(dict.fromkeys(arguments + targets))}
    names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    names += [node.id for node in used if node.id not in numbers]
    for node in nodes:
        own = vars(node)
        own.update({field: IGNORED[field] for field in IGNORED.keys() & own.keys()})
        if isinstance(node, (ast.Name, ast.arg)):
            own[node._fields[0]] = numbers.get(own[node._fields[0]], own[node._fields[0]])
    return re.sub(BY_PYTHON, "", ast.dump(tree)), list(dict.fromkeys(names))


@cache
def _table() -> dict[str, dict[str, str]]:
    """Name of a class -> its known fingerprints -> a release with each of them."""
    table: dict[str, dict[str, str]] = documents.parse(FILE.read_bytes())
    return table
