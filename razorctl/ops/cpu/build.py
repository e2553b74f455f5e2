"""Compiles the C kernels once for a machine, with the compiler that is there.

`start` compiles in the background, beside the imports of torch; `built` waits for the result.
Nothing here imports torch. A library of before is loaded only if nobody else can have written it,
and only whole: it ends with a checksum.
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

from razorctl import folders

SOURCES = Path(__file__).parent
# NaN and infinity keep their meaning: scales depend on it. -O2 takes 0.4 s less to compile than -O3
# for the same loops, with GCC once their vectors need not pay off at every length.
FLAGS = (
    *("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native"),
    *("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-shared", "-fPIC"),
)
GCC_FLAGS = ("-fvect-cost-model=dynamic",)
COMPILERS = ("cc", "gcc", "clang")
LONGEST = 120  # seconds that a compiler may take
SEAL = b"\nrazorctl sha256 "  # before the checksum of what is before it
CHECKSUM = 64  # characters


@dataclass(frozen=True)
class Built:
    """The compiled library, or why there is none.

    failed: whether a compiler was there. folder: one that goes when this object does, if the user's
    cache cannot be used. handle: the file at `path` that was looked at, open.
    """

    path: Path | None
    why: str
    failed: bool = False
    folder: "tempfile.TemporaryDirectory[str] | None" = None
    handle: int | None = None

    @property
    def loadable(self) -> str:
        """A path of the file that was looked at, whatever lies at `path` by now."""
        opened = Path(f"/proc/self/fd/{self.handle}")
        return str(opened if self.handle is not None and opened.exists() else self.path)


def start(device: str | None = None) -> None:
    """Begins to compile the kernels in the background, unless that is done.

    device: where the user wants work to run; None leaves it open.
    """
    if device in (None, "cpu"):
        _building()


def built() -> Built:
    """The compiled library; waits until it is there."""
    return _building().result()


@cache
def _building() -> Future[Built]:
    pool = ThreadPoolExecutor(1, "kernels")
    try:
        return pool.submit(build)
    finally:
        pool.shutdown(wait=False)


def compiler() -> list[str] | None:
    """The command of the C compiler: that of $CC, or the first of COMPILERS; None without one."""
    try:
        own = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # an open quotation
        own = []
    for words in (own, *([name] for name in COMPILERS)):
        if words and shutil.which(words[0]):
            return words
    return None


def build() -> Built:
    """Finds the library that was compiled for this machine before, or compiles it."""
    command = compiler()
    if command is None:
        return Built(None, "no C compiler")
    try:
        version = _run([*command, "--version"]).splitlines()[0]
        path = folders.cache() / "kernels" / f"kernels-{_digest(version)}.so"
        folder, own = None, _is_private(path.parent)
        handle = _opened(path) if own else None
        if handle is None:
            path, folder = _compiled([*command, *flags(version)], path if own else None)
            handle = _opened(path)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        return Built(None, f"{shlex.join(command)} failed: {_reason(error)}", failed=True)
    return Built(path, f"compiled with {version}", folder=folder, handle=handle)


def _is_private(folder: Path) -> bool:
    """Whether a folder, which is made if it is missing, is the user's own and nobody else's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return False
    return True


def _opened(path: Path) -> int | None:
    """The open file of a library that only the user or root can have written; None if it is not so.

    None too if it is not there, or not whole: one that is cut off would end the process.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(handle)
    own = stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0)
    if own and not found.st_mode & 0o022:
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
        if content.endswith(_seal(content[: -len(SEAL) - CHECKSUM])):
            return handle
    os.close(handle)
    return None


def _seal(content: bytes) -> bytes:
    """The end of a library with that content."""
    return SEAL + hashlib.sha256(content).hexdigest().encode()


def flags(version: str) -> tuple[str, ...]:
    """Those of a compiler that calls itself `version`."""
    return FLAGS if "clang" in version else (*FLAGS, *GCC_FLAGS)


def _digest(version: str) -> str:
    """What differs between libraries: sources, flags, compiler and the machine's instructions."""
    digest = hashlib.sha256(repr((flags(version), version, _cpu())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """The model and the instructions of the CPU; some folders are shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(kept))


def _compiled(
    command: list[str], path: Path | None
) -> tuple[Path, "tempfile.TemporaryDirectory[str] | None"]:
    """Compiles to `path`, in one step for other processes, or to a folder of this process.

    Returns where the library is, and that folder.
    """
    folder = None
    try:
        if path is None:
            raise OSError("the user's cache is not the user's own")
        handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="razorctl-", ignore_cleanup_errors=True)
        path = Path(folder.name) / "kernels.so"
        made = f"{path}.made"
    try:
        _run([*command, *map(str, sorted(SOURCES.glob("*.c"))), "-lm", "-o", made])
        content = Path(made).read_bytes()
        with Path(made).open("ab") as file:
            file.write(_seal(content))
            file.flush()
            os.fsync(file.fileno())
        Path(made).chmod(0o700)
        os.replace(made, path)  # noqa: PTH105
    finally:
        Path(made).unlink(missing_ok=True)
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
    said = getattr(error, "stderr", None)
    lines = said.splitlines() if isinstance(said, str) else []
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
