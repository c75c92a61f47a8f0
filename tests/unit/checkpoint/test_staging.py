"""Folders that appear whole or not at all: locks, what killed processes leave, what is not ours."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from moe_qlora.checkpoint.staging import (
    check_new,
    left_behind,
    move_files,
    new_folder,
    replace_file,
    staging,
)
from moe_qlora.errors import CheckpointError

LOCK, PARTIAL = ".model.moe_qlora.lock", ".model.moe_qlora.partial"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_new_folder_appears_when_it_is_whole(tmp_path):
    goal = tmp_path / "deep" / "er" / "model"
    with new_folder(goal) as work:
        (work / "sub").mkdir()
        (work / "sub" / "x").write_text("1")
        assert not goal.exists()
        assert work.parent == goal.parent
    assert (goal / "sub" / "x").read_text() == "1"
    assert names(goal.parent) == ["model"]


def fail_within(goal: Path, error: Exception | None = None) -> None:
    with new_folder(goal) as work:
        (work / "x").write_text("1")
        raise error or KeyError


def test_the_root_file_of_the_last_name_is_moved_last(tmp_path, monkeypatch):
    """It turns the old model into the new one; others of its name follow all other files."""
    work, folder = tmp_path / "work", tmp_path / "folder"
    files = ["config.json", "a.bin", "z/config.json", "z/y/config.json", "z/a.bin"]
    for name in files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name, encoding="utf-8")
    folder.mkdir()
    moved = []
    real = Path.replace

    def replace(self, target):
        moved.append(target.relative_to(folder).as_posix())
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    move_files(work, folder, "config.json")
    assert sorted(moved[:2]) == ["a.bin", "z/a.bin"]
    assert moved[2:] == ["z/y/config.json", "z/config.json", "config.json"]
    assert [(folder / name).read_text(encoding="utf-8") for name in files] == files


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (KeyError("x"), KeyError, "x"),
        (
            OSError(28, "No space left on device"),
            CheckpointError,
            "model cannot be written: No space left on device; make room there or name another",
        ),
        (
            SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            CheckpointError,
            r"model cannot be written: No space left on device \(os error 28\); make room there",
        ),
    ],
)
def test_a_failure_leaves_nothing(tmp_path, error, raised, said):
    with pytest.raises(raised, match=said):
        fail_within(tmp_path / "model", error)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "first", "second", "said"),
    [
        (errno.EACCES, "source/x", None, "source/x cannot be read: Permission denied."),
        (errno.EACCES, "place/.model.1.partial/x", None, "place/model cannot be written: Perm"),
        (errno.EACCES, "place", None, "place/model cannot be written: Permission denied; name"),
        (errno.ENOSPC, "source/x", "place/y", "place/model cannot be written: No space left"),
    ],
)
def test_what_could_not_be_read_or_written_is_named(tmp_path, code, first, second, said):
    paths = [str(tmp_path / first), None, second and str(tmp_path / second)]
    with (
        pytest.raises(CheckpointError, match=rf"^{tmp_path}/{said}"),
        new_folder(tmp_path / "place/model"),
    ):
        raise OSError(code, os.strerror(code), *paths)


def test_a_folder_that_is_there_is_written_whatever_follows(tmp_path, monkeypatch):
    """A system that flushes no folders, or says of a full disk after the folder was renamed."""
    goal, flush = tmp_path / "model", os.fsync

    def fsync(handle: int) -> None:
        if os.path.sameopenfile(handle, parent):
            raise OSError(28, "No space left on device")
        flush(handle)

    parent = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(os, "fsync", fsync)
    with new_folder(goal) as work:
        (work / "x").write_text("1")
    replace_file(tmp_path / "file", b"2")
    os.close(parent)
    assert names(tmp_path) == ["file", "model"]


def test_a_mount_is_refused_before_the_work(tmp_path, monkeypatch):
    goal = tmp_path / "volume"
    goal.mkdir()
    monkeypatch.setattr(type(goal), "is_mount", lambda path: path == goal)
    with pytest.raises(CheckpointError, match="is where a file system is mounted"):
        check_new(goal)
    check_new(goal / "model")


@pytest.mark.parametrize("kind", ["full", "file", "link", "dangling"])
def test_nothing_is_overwritten(tmp_path, kind):
    goal, other = tmp_path / "model", tmp_path / "other"
    if kind == "full":
        goal.mkdir()
        (goal / "x").write_text("1")
    elif kind == "file":
        goal.write_text("1")
    else:
        if kind == "link":
            other.mkdir()
        goal.symlink_to(other)
    with pytest.raises(CheckpointError, match="exists"), new_folder(goal):
        pass
    assert names(tmp_path) == sorted({"model"} | ({"other"} if kind == "link" else set()))


def test_what_appears_meanwhile_is_not_overwritten_either(tmp_path):
    goal = tmp_path / "model"
    building = new_folder(goal)
    (building.__enter__() / "x").write_text("ours")
    goal.mkdir()
    (goal / "x").write_text("theirs")
    with pytest.raises(CheckpointError, match="not empty"):
        building.__exit__(None, None, None)
    assert (goal / "x").read_text() == "theirs"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as work:
        (work / "x").write_text("1")
    assert names(tmp_path / "model") == ["x"]


def test_a_file_is_replaced_at_once_and_no_link_is_followed(tmp_path):
    file, other = tmp_path / "f", tmp_path / "other"
    replace_file(file, b"one")
    replace_file(file, b"two")
    assert file.read_bytes() == b"two"
    other.write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(other)
    replace_file(tmp_path / "link", b"ours")
    assert other.read_bytes() == b"theirs"
    assert names(tmp_path) == ["f", "link", "other"]


def test_a_new_folder_may_be_read_by_whom_the_system_lets(tmp_path):
    (tmp_path / "other").mkdir()
    with new_folder(tmp_path / "model") as work:
        replace_file(work / "x", b"1")
    (tmp_path / "x").write_bytes(b"1")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert (tmp_path / "model" / "x").stat().st_mode == (tmp_path / "x").stat().st_mode


# --- several processes --------------------------------------------------------------------------


def test_a_folder_is_built_by_one_process_at_a_time(tmp_path):
    goal = tmp_path / "model"
    with new_folder(goal) as work:
        (work / "x").write_text("1")
        with pytest.raises(CheckpointError, match=r"Another process is writing to .*model: wait"):
            fail_within(goal)
    assert names(goal) == ["x"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_killed_process_keeps_no_lock_and_its_folder_is_removed(copied, tmp_path, inside):
    goal = tmp_path / "model"
    goal.mkdir()
    (goal / "x").write_text("kept")

    def work() -> None:
        with staging(goal, inside=inside) as folder:
            (folder / "x").write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)

    assert copied(work).ended() == -signal.SIGKILL
    assert len(left_behind(goal)) == 2
    with staging(goal, inside=inside) as folder:
        assert names(folder) == []
    assert left_behind(goal) == []
    assert (names(tmp_path), names(goal)) == (["model"], ["x"])


def test_a_forked_process_does_not_keep_the_lock(copied, tmp_path):
    def fail() -> None:
        with new_folder(tmp_path / "model"):
            copied(lambda: time.sleep(60))  # such as a worker that loads data
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with new_folder(tmp_path / "model") as work:
        (work / "x").write_text("1")
    assert names(tmp_path / "model") == ["x"]


# --- what is not ours ---------------------------------------------------------------------------


def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "x").write_text("precious")
    return folder


@pytest.mark.parametrize("kind", ["link", "another owner's"])
def test_a_staging_folder_that_is_not_ours_is_refused(tmp_path, monkeypatch, kind):
    precious, own = secret(tmp_path), os.geteuid()
    if kind == "link":
        (tmp_path / PARTIAL).symlink_to(precious)
    else:
        precious = precious.rename(tmp_path / PARTIAL)
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(CheckpointError, match="is a link, or another user's: move it away"):
        fail_within(tmp_path / "model")
    assert names(precious) == ["x"]


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_the_lock_is_no_way_to_other_files(tmp_path, kind):
    file, lock = secret(tmp_path) / "x", tmp_path / LOCK
    if kind == "link":
        lock.symlink_to(file)
    elif kind == "hard link":
        lock.hardlink_to(file)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    if kind in ("link", "folder"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            fail_within(tmp_path / "model")
    else:
        with new_folder(tmp_path / "model"):
            pass
    assert file.read_text() == "precious"


def test_a_file_is_not_written_through_a_link_beside_it(tmp_path):
    file = secret(tmp_path) / "x"
    (tmp_path / ".f.partial").symlink_to(file)
    replace_file(tmp_path / "f", b"ours")
    assert (tmp_path / "f").read_bytes() == b"ours"
    assert file.read_text() == "precious"
