"""Compiles the C kernels once for a machine, with the machine's compiler.

`start` compiles in the background while torch is imported; `built` waits for the result. Nothing
here imports torch. An existing library is loaded only if nobody else can have written it and it is
complete: it ends with a checksum.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from razorctl.system import folders

SOURCES = Path(__file__).parents[1] / "ops" / "cpu"
# Scales depend on NaN and infinity, so no -ffast-math. -O2 compiles 0.4 s faster than -O3, and
# vectorizes the same loops if GCC gets its dynamic cost model.
FLAGS = (
    "-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-fopenmp", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-shared", "-fPIC",
)  # fmt: skip
GCC_FLAGS = ("-fvect-cost-model=dynamic",)
COMPILERS = ("cc", "gcc", "clang")
LONGEST = 120  # seconds that a compiler may take
SEAL = b"\nrazorctl sha256 "  # precedes the checksum of the content
CHECKSUM = 64  # characters


@dataclass(frozen=True)
class Built:
    """The compiled library, or why there is none.

    Args:
        path: The library; None if there is none.
        why: The compiler, or why there is no library.
        failed: Whether a compiler was found and failed.
        folder: A folder that is deleted with this object, if the user's cache cannot be used.
        handle: The checked file at `path`, open.
    """

    path: Path | None
    why: str
    failed: bool = False
    folder: "tempfile.TemporaryDirectory[str] | None" = None
    handle: int | None = None

    @property
    def loadable(self) -> str:
        """A path to the checked file, even if `path` is another file by now."""
        opened = Path(f"/proc/self/fd/{self.handle}")
        return str(opened if self.handle is not None and opened.exists() else self.path)


def start(device: str | None = None) -> None:
    """Begins to compile the kernels in the background, unless they are compiled already.

    device: the user's choice; None if there is none.
    """
    if device in (None, "cpu"):
        _building()


def built() -> Built:
    """The compiled library; waits for it."""
    return _building().result()


@cache
def _building() -> Future[Built]:
    pool = ThreadPoolExecutor(1, "kernels")
    try:
        return pool.submit(build)
    finally:
        pool.shutdown(wait=False)


def compiler() -> list[str] | None:
    """The command of the C compiler: $CC, or the first of COMPILERS; None without one."""
    try:
        words = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # an open quotation
        words = []
    for command in (words, *([name] for name in COMPILERS)):
        if command and shutil.which(command[0]):
            return command
    return None


def build() -> Built:
    """Finds the library for this machine, or compiles it."""
    command = compiler()
    if command is None:
        return Built(None, "no C compiler")
    try:
        version = _run([*command, "--version"]).splitlines()[0]
        path = folders.cache() / "kernels" / f"kernels-{_digest(version)}.so"
        folder, private = None, _is_private(path.parent)
        handle = _opened(path) if private else None
        if handle is None:
            path, folder = _compiled([*command, *flags(version)], path if private else None)
            handle = _opened(path)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        return Built(None, f"{shlex.join(command)} failed: {_reason(error)}", failed=True)
    return Built(path, f"compiled with {version}", folder=folder, handle=handle)


def _is_private(folder: Path) -> bool:
    """Whether only the user can write a folder; creates it if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return False
    return True


def _opened(path: Path) -> int | None:
    """The open file of a library that only the user or root can have written; else None.

    None too if it is missing or incomplete: loading a truncated library would end the process.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(handle)
    trusted = stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0)
    if trusted and not status.st_mode & 0o022:
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
        if content.endswith(_seal(content[: -len(SEAL) - CHECKSUM])):
            return handle
    os.close(handle)
    return None


def _seal(content: bytes) -> bytes:
    """The end of a library with some content."""
    return SEAL + hashlib.sha256(content).hexdigest().encode()


def flags(version: str) -> tuple[str, ...]:
    """The flags for a compiler, by its version line."""
    return FLAGS if "clang" in version else (*FLAGS, *GCC_FLAGS)


def _digest(version: str) -> str:
    """The digest of sources, flags, compiler and the machine's instructions."""
    digest = hashlib.sha256(repr((flags(version), version, _cpu())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """The model and instructions of the CPU: several machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(names))


def _compiled(
    command: list[str], path: Path | None
) -> tuple[Path, "tempfile.TemporaryDirectory[str] | None"]:
    """Compiles to `path`, atomically, or to a temporary folder of this process.

    Returns the path of the library, and the temporary folder if there is one.
    """
    folder = None
    try:
        if path is None:
            raise OSError("the user's cache is not the user's own")
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="razorctl-", ignore_cleanup_errors=True)
        path = Path(folder.name) / "kernels.so"
        temporary = f"{path}.temporary"
    try:
        _run([*command, *map(str, sorted(SOURCES.glob("*.c"))), "-lm", "-o", temporary])
        content = Path(temporary).read_bytes()
        with Path(temporary).open("ab") as file:
            file.write(_seal(content))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o700)
        os.replace(temporary, path)  # noqa: PTH105
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path, folder


def _run(command: list[str]) -> str:
    return subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LONGEST,
    ).stdout


def _reason(error: Exception) -> str:
    """The compiler's first line about an error, or the error itself."""
    output = getattr(error, "stderr", None)
    lines = output.splitlines() if isinstance(output, str) else []
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
