"""JSON that razorctl writes and reads, and TOML; a document is checked as a whole.

A kind of document is any type that pydantic knows, usually a dataclass beside the code that writes
it. Its `__post_init__` may check what types cannot express.
"""

import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from razorctl.errors import TOO_MANY, DataError, RazorError, lacks_memory, raise_lack

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST = 2**63  # integers of a document are below it
SUSPECT = re.compile(rb"\d{19}|[eE]\+?\d{3}")  # occurs in every number that is too large
LONGEST = 160  # characters of a reason
CHUNK = 1 << 20
LARGEST = 1 << 30  # bytes of a document
LARGEST_FOREIGN = 1 << 26  # of one that a library or a user has written
SEAL = "digest"  # the key that `sealed` adds


class UnlikeError(ValueError):
    """A text that is not a document of its kind; the message says why, and names the field."""


def text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, in printable ASCII; non-finite numbers become null, since JSON has none."""
    try:
        json_text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        json_text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    return json_text.replace("\x7f", "\\u007f")


def parse(content: bytes | str) -> Any:
    """The value of a JSON text; raises UnlikeError if it is not JSON, or has bad numbers.

    Bad are non-finite numbers, and integers of more than 64 bits; no document has them.
    """
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    numbers = {"parse_float": _real, "parse_int": _integer} if SUSPECT.search(raw) else {}
    return _parsed(content, parse_constant=_no_number, **numbers)


def _parsed(content: bytes | str, **numbers: Any) -> Any:
    try:
        return json.loads(content, **numbers)
    except RecursionError:
        raise UnlikeError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise UnlikeError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UnlikeError(f"{error.msg} in line {error.lineno}") from None
    except ValueError as error:
        raise UnlikeError(str(error)) from None


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """The tables of a TOML text; raises UnlikeError as `parse` does."""
    import tomllib  # imported here: --help needs none

    try:
        tables = tomllib.loads(content if isinstance(content, str) else content.decode())
        parse(json.dumps(tables, default=str))
    except RecursionError:
        raise UnlikeError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise UnlikeError("it is not UTF-8") from None
    except ValueError as error:
        raise UnlikeError(str(error)[:LONGEST]) from None
    return tables


def parse_kind(content: bytes | str, kind: Any) -> Any:
    """The value of a JSON text, as `parse` returns it; raises UnlikeError for another kind.

    A document with a digest must be unchanged since `sealed` returned it.
    """
    from pydantic import ValidationError  # imported here: few commands read a document

    value = parse(content)
    try:
        _adapter(kind).validate_json(content, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg'].removeprefix('Value error, ').rstrip('.')}"
        raise UnlikeError(reason.removeprefix(": ")[:LONGEST]) from None
    if isinstance(value, dict) and SEAL in value and sealed(value) != value:
        raise UnlikeError("it was edited after it was written")
    return value


def read(file: Path, kind: Any, mend: str) -> Any:
    """The value of a file of a kind; `mend` ends the sentence of the error.

    Raises FileNotFoundError if it does not exist, and DataError if it is no such document.
    """
    with _refusing(file, mend):
        return parse_kind(read_bytes(file), kind)


def read_lines(file: Path, kind: Any, mend: str) -> list[Any]:
    """The values of a file with one document of a kind per line; raises as `read` does."""
    with _refusing(file, mend):
        documents = read_bytes(file).splitlines()
        return list(parse_kind(b"[" + b",".join(documents) + b"]", list[kind]))


def check_tables(value: Mapping[str, Any], kind: Any, file: Path, mend: str) -> None:
    """Raises DataError as `read` does if the tables of a TOML file are not of a kind."""
    with _refusing(file, mend):
        parse_kind(json.dumps(value, default=str), kind)


@contextmanager
def _refusing(file: Path, mend: str) -> Iterator[None]:
    """Raises DataError for a file that cannot be read or is of another kind."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise_lack(error)
        raise DataError(f"{file} cannot be read ({error.strerror}); {mend}.") from None
    except UnlikeError as error:
        raise DataError(
            f"{file} is not as this version of razorctl writes it ({error}); {mend}."
        ) from None


def read_cached(file: Path, kind: Any) -> Any:
    """The value of a cache file; None if it does not exist or is of another kind."""
    with suppress(OSError, UnlikeError):
        return parse_kind(read_bytes(file), kind)
    return None


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a digest of its other keys."""
    from hashlib import sha256  # imported here: few commands need it

    rest = {name: value for name, value in body.items() if name != SEAL}
    return {**rest, SEAL: sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def size_and_checksum(file: Path) -> dict[str, int]:
    """The size and the checksum of a regular file; raises OSError for anything else."""
    size = checksum = 0
    with open_regular(file) as stream:
        while chunk := stream.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": checksum}


def read_foreign(file: Path) -> dict[str, Any]:
    """The JSON object in a file of another library, which may have non-finite numbers.

    Raises OSError, and UnlikeError if it is no JSON object.
    """
    value = _parsed(read_bytes(file, LARGEST_FOREIGN))
    if not isinstance(value, dict):
        raise UnlikeError("it is not an object")
    return value


def read_bytes(file: Path, most: int = LARGEST) -> bytes:
    """The bytes of a regular file; raises OSError for anything else, or for more than `most`."""
    with open_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
        return stream.read()


def open_regular(file: Path) -> IO[bytes]:
    """A regular file, opened to read; raises OSError for anything else."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(file, flags)
    except OSError as error:
        if lacks_memory(error):
            raise MemoryError(str(error)) from None  # not the file's fault
        if error.errno in TOO_MANY:
            raise RazorError(f"{error}; raise the limit with `ulimit -n`.") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a regular file", str(file))
    return open(handle, "rb")  # noqa: PTH123


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _finite(value: Any) -> Any:
    """The value with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def _no_number(word: str) -> Any:
    raise UnlikeError(f"{word} is not a number")


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise UnlikeError(f"{digits[:20]} is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -MOST <= (value := int(digits)) < MOST:
        raise UnlikeError(f"{digits[:20]} is too large")
    return value
