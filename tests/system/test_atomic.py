"""Files and folders that are written completely or not at all."""

import os
from pathlib import Path

import pytest

from razorctl.errors import UsageError
from razorctl.system import atomic

NAME = ".razorctl-" + "0" * 32
OTHERS = "of somebody else"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def _links(request, monkeypatch):
    """A file system with hard links, and one without."""
    if not request.param:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: os.link("nothing", "here"))


def write_file(path, text, then=lambda: None, **options):
    """Writes a file atomically, and calls `then` before it appears."""
    with atomic.atomic_file(Path(path), **options) as file:
        file.write_text(text)
        then()


def write_folder(path, then):
    with atomic.atomic_folder(Path(path)) as folder:
        (folder / "mine").touch()
        then()


def fail() -> None:
    raise ZeroDivisionError


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.mark.usefixtures("_links")
def test_a_file_is_there_whole_or_not_at_all():
    with pytest.raises(ZeroDivisionError):
        write_file("a.txt", "half", fail)
    assert files() == []
    with atomic.atomic_file(Path("a.txt")) as file:
        file.write_text("whole")
        assert files() == [file.name]
    assert files() == ["a.txt"]
    assert Path("a.txt").read_text() == "whole"
    assert Path("a.txt").stat().st_nlink == 1


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("kind", ["file", "hard link", "link", "link to nothing", "fifo", "folder"])
def test_what_appears_meanwhile_stays(kind):
    Path("other").write_text(OTHERS)
    make = {
        "file": lambda path: path.write_text(OTHERS),
        "hard link": lambda path: os.link("other", path),
        "link": lambda path: path.symlink_to("other"),
        "link to nothing": lambda path: path.symlink_to("nowhere"),
        "fifo": os.mkfifo,
        "folder": Path.mkdir,
    }
    with pytest.raises(UsageError, match=r"^a exists already; name another file with --html\.$"):
        write_file("a", "mine", lambda: make[kind](Path("a")), option="--html")
    with pytest.raises(UsageError, match="a exists already"):
        atomic.check_room(Path("a"), "--html")
    with pytest.raises(UsageError, match=r"^a exists already; name another directory with --out"):
        write_folder("a", fail)
    assert files() == ["a", "other"]
    assert Path("other").read_text() == OTHERS
    if kind == "file":
        assert Path("a").read_text() == OTHERS


def test_a_folder_that_appears_meanwhile_stays():
    with pytest.raises(UsageError, match="a exists already"):
        write_folder("a", Path("a").mkdir)
    assert files() == ["a"]
    assert not [*Path("a").iterdir()]


@pytest.mark.parametrize("link", [Path.symlink_to, lambda path, to: os.link(to, path)])
def test_what_links_share_is_not_written_when_one_is_replaced(link):
    Path("other").write_text(OTHERS)
    link(Path("a"), "other")
    write_file("a", "mine", replace=True)
    assert Path("other").read_text() == OTHERS
    assert Path("a").read_text() == "mine"
    assert not Path("a").is_symlink()


def test_nothing_is_written_through_a_planted_link_and_it_stays(monkeypatch):
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda _: "0" * 32)
    Path("other").write_text(OTHERS)
    Path(NAME).symlink_to("other")
    for write in (
        lambda: atomic.check_room(Path("a"), "--out"),
        lambda: atomic.atomic_file(Path("a")).__enter__(),
        lambda: atomic.atomic_folder(Path("a")).__enter__(),
    ):
        with pytest.raises((UsageError, FileExistsError), match=r"[Ee]xists"):
            write()
    assert files() == [NAME, "other"]
    assert Path("other").read_text() == OTHERS


def test_a_name_may_be_as_long_as_names_are():
    name = "n" * 251 + ".csv"
    with atomic.atomic_file(Path(name)) as file:
        assert file.suffix == ".csv"
    assert files() == [name]


def test_only_what_killed_processes_left_is_swept():
    Path(NAME).write_text("left")
    Path(NAME[:-1] + "1").mkdir()
    Path(NAME[:-1] + "1", "file").touch()
    users = [".saving-x", "a.partial", ".razorctl-0", f"{NAME}.b.c"]
    for name in users:
        Path(name).touch()
    atomic.sweep(Path())
    assert files() == sorted(users)


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_rename_that_fails_leaves_nothing(write, monkeypatch, request):
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    linked = write is write_file and request.node.callspec.params["_links"]
    if linked:
        write_file("a", "mine")
    else:
        arguments = ("a", "mine") if write is write_file else ("a", lambda: None)
        with pytest.raises((OSError, UsageError), match="No space left on device"):
            write(*arguments)
    assert files() == ["a"] * linked
