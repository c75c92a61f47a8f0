"""Folders that appear whole or not at all: locks, what killed processes leave, what is not ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from moe_qlora.checkpoint.folder import check_new, new_folder, replace_file
from moe_qlora.errors import CheckpointError

LOCK, PARTIAL = ".model.moe_qlora.lock", ".model.moe_qlora.partial"
FULL = "No space left on device"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def build(goal: Path, error: Exception | None = None) -> None:
    with new_folder(goal) as work:
        assert work.parent == goal.parent and not (goal / "x").exists()
        replace_file(work / "x", b"ours")
        (work / "sub").mkdir()
        if error is not None:
            raise error


@pytest.mark.parametrize("empty", [False, True])
def test_a_new_folder_appears_when_it_is_whole(tmp_path, empty):
    goal = tmp_path / "deep" / "er" / "model"
    if empty:
        goal.mkdir(parents=True)
    build(goal)
    assert (names(goal.parent), names(goal)) == (["model"], ["sub", "x"])
    # and may be read by whom the system lets
    (tmp_path / "x").write_bytes(b"1")
    assert (goal / "x").stat().st_mode == (tmp_path / "x").stat().st_mode
    assert goal.stat().st_mode == goal.parent.stat().st_mode


WRAPPED = SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")
FAILURES = [
    (KeyError("x"), "x"),
    ((errno.ENOSPC, ""), f"place/model cannot be written: {FULL}; make room there, or name"),
    (WRAPPED, rf"place/model cannot be written: {FULL} \(os error 28\); make room there"),
    ((errno.EACCES, "source/x"), r"place/model cannot be written: Perm.*\(.*source/x\)"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES)
def test_a_failure_leaves_nothing_and_names_what_could_not_be_read_or_written(
    tmp_path, error, said
):
    if isinstance(error, tuple):
        code, path = error
        error = OSError(code, os.strerror(code), *([str(tmp_path / path)] if path else []))
    kind = KeyError if isinstance(error, KeyError) else CheckpointError
    with pytest.raises(kind, match=said):
        build(tmp_path / "place/model", error)
    assert names(tmp_path / "place") == []


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_nothing_is_overwritten(tmp_path, kind):
    goal = tmp_path / "model"
    if kind == "full":
        goal.mkdir()
        (goal / "x").write_text("1")
    elif kind == "file":
        goal.write_text("1")
    else:
        goal.symlink_to(tmp_path / "other")
    before = names(tmp_path)
    for call in (check_new, build):
        with pytest.raises(CheckpointError, match="exists and is no empty folder, or is a mount"):
            call(goal)
    assert names(tmp_path) == before


# --- what is not ours ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        (PARTIAL, "link", "cannot be written: Cannot call rmtree on a symbolic link"),
        (LOCK, "link", "cannot be written"),
        (LOCK, "folder", "cannot be written"),
        (LOCK, "hard link", None),
        (LOCK, "pipe", None),
    ],
)
def test_staging_and_lock_are_no_way_to_other_files(tmp_path, place, kind, said):
    folder, planted = tmp_path / "precious", tmp_path / place
    folder.mkdir()
    (folder / "x").write_text("precious")
    if kind == "link":
        planted.symlink_to(folder if place == PARTIAL else folder / "x")
    elif kind == "hard link":
        planted.hardlink_to(folder / "x")
    elif kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    if said is None:
        build(tmp_path / "model")
    else:
        with pytest.raises(CheckpointError, match=said):
            build(tmp_path / "model")
    assert (folder / "x").read_text() == "precious"


def test_a_file_is_replaced_and_no_link_is_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"theirs")
    for link in ("link", ".f.partial"):
        (tmp_path / link).symlink_to(tmp_path / "other")
    for file, content in (("f", b"one"), ("f", b"two"), ("link", b"one")):
        replace_file(tmp_path / file, content)
        assert (tmp_path / file).read_bytes() == content
    assert (tmp_path / "other").read_bytes() == b"theirs"
