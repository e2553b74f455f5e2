import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from razorctl.ops.cpu import library
from razorctl.system import c_compiler, folders

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "fake 1.0" && exit
while [ "$1" != -o ]; do shift; done
sleep 0.1
{result}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of compiled libraries, empty."""
    monkeypatch.setattr(folders, "cache", lambda: tmp_path / "razorctl")
    return tmp_path / "razorctl"


def compiler(folder: Path, result: str) -> str:
    """A slow compiler that ends with the shell command `result`; $2 is its output."""
    path = folder / "fake-cc"
    path.write_text(COMPILER.format(result=result))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_machine_compiles_once(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler(tmp_path, 'echo library > "$2"'))
    first = c_compiler.build()
    assert first.path.read_bytes().startswith(b"library\n")
    assert first.why == "compiled with fake 1.0"
    assert list((cache / "kernels").iterdir()) == [first.path]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (cache / "kernels", first.path)] == [0o700] * 2
    monkeypatch.setenv("CC", compiler(tmp_path, "exit 1"))
    assert c_compiler.build().path == first.path


DISTRUSTED = {
    "cut off": lambda path, folder: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path, folder: path.write_bytes(b""),
    "another's": lambda path, folder: os.chown(path, 12345, 12345),
    "writable by others": lambda path, folder: path.chmod(0o722),
    "a link": lambda path, folder: path.symlink_to(path.rename(folder / "other.so")),
    "in another's folder": lambda path, folder: os.chown(path.parent, 12345, 12345),
    "in a linked folder": lambda path, folder: path.parent.symlink_to(
        path.parent.rename(folder / "other")
    ),
}


@pytest.mark.parametrize("how", DISTRUSTED)
def test_a_library_that_another_may_have_written_or_that_is_not_whole(
    how, cache, tmp_path, monkeypatch
):
    if "another's" in how and os.geteuid():
        pytest.skip("needs root, who alone can give files away")
    monkeypatch.setenv("CC", compiler(tmp_path, 'echo library > "$2"'))
    first = c_compiler.build()
    content = first.path.read_bytes()
    DISTRUSTED[how](first.path, tmp_path)
    monkeypatch.setenv("CC", compiler(tmp_path, 'echo again > "$2"'))
    second = c_compiler.build()
    assert Path(second.loadable).read_bytes().startswith(b"again\n")
    assert second.path.stat().st_uid == os.geteuid()
    # What lies in a folder that is not trusted stays as it is, and each process compiles its own.
    assert (second.folder is not None) == ("folder" in how)
    assert how != "in a linked folder" or first.path.read_bytes() == content


def test_what_is_loaded_is_what_was_looked_at(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler(tmp_path, 'echo library > "$2"'))
    built = c_compiler.build()
    (tmp_path / "other.so").write_text("other")
    (tmp_path / "other.so").replace(built.path)
    assert Path(built.loadable).read_bytes().startswith(b"library\n")


@pytest.mark.parametrize("change", ["sources", "flags", "cpu"])
def test_what_a_library_depends_on_names_it(change, tmp_path, monkeypatch):
    before = c_compiler._digest("cc 1")
    assert c_compiler._digest("cc 2") != before
    if change == "sources":
        (tmp_path / "other.c").write_text("int x;")
        monkeypatch.setattr(c_compiler, "SOURCES", tmp_path)
    elif change == "flags":
        monkeypatch.setattr(c_compiler, "FLAGS", ("-O1",))
    else:
        monkeypatch.setattr(c_compiler, "_cpu", lambda: "another")
    assert c_compiler._digest("cc 1") != before


def test_clang_is_given_no_flag_that_it_refuses():
    assert set(c_compiler.GCC_FLAGS) <= set(c_compiler.flags("cc (Debian 12.2.0-14) 12.2.0"))
    assert not set(c_compiler.GCC_FLAGS) & set(c_compiler.flags("Debian clang version 14.0.6"))


def test_two_processes_at_once_make_one_library_without_torch(tmp_path):
    code = (
        "import sys; from razorctl.system import c_compiler; c_compiler.start();"
        "built = c_compiler.built();"
        "assert 'torch' not in sys.modules; print(built.path, built.path.read_text())"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path), "CC": compiler(tmp_path, 'echo library > "$2"')}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(said) == 1
    assert "library" in said.pop()
    assert len(list((tmp_path / "razorctl/kernels").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_not_needed(cache, tmp_path, monkeypatch):
    cache.write_text("a file where the folder would be")
    monkeypatch.setenv("CC", compiler(tmp_path, 'echo library > "$2"'))
    built = c_compiler.build()
    assert built.path.read_bytes().startswith(b"library\n")
    built.folder.cleanup()
    assert not built.path.exists()


def test_no_compiler_is_no_warning(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(c_compiler, "built", c_compiler.build)
    with caplog.at_level(logging.INFO):
        assert library._loaded.__wrapped__() == (None, "PyTorch operations: no C compiler")
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ("echo 'x.c:1: note' >&2; echo 'x.c:2: error: no' >&2; exit 1", "x.c:2: error: no"),
        ("exit 1", "non-zero exit status"),
        ('rm "$2"', "No such file"),
        ('echo library > "$2"', "kernels-"),
    ],
)
def test_a_failing_compiler_is_one_warning(result, why, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CC", compiler(tmp_path, result))
    monkeypatch.setattr(c_compiler, "built", c_compiler.build)
    loaded, state = library._loaded.__wrapped__()
    assert loaded is None
    assert state.startswith("PyTorch operations: ")
    assert why in state
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert why in caplog.text


def test_kernels_that_are_not_wanted_are_not_compiled(cache, monkeypatch):
    monkeypatch.setattr(library, "wanted", lambda: False)
    monkeypatch.setattr(c_compiler, "built", lambda: pytest.fail("compiled"))
    assert library._loaded.__wrapped__() == (None, "PyTorch operations")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is loaded")
def test_torch_and_the_kernels_share_an_openmp_runtime():
    if library.library() is None:
        pytest.skip(library.state())
    code = (
        "from pathlib import Path; from razorctl.ops.cpu import library; library.library();"
        "lines = Path('/proc/self/maps').read_text().splitlines();"
        "print(*{line.split()[-1] for line in lines if 'libgomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.split()) == 1  # other libraries that tests import may bring more
