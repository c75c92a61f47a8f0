"""Files of a folder against safetensors' own reading and writing; tricks with paths; folders that
appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from folders import TRICKS, index, noise, same, two_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_qlora.checkpoint.folder import (
    DTYPES,
    INDEX,
    INDEX_SUFFIX,
    SINGLE,
    check_new,
    new_folder,
    read_header,
    replace_file,
)
from moe_qlora.checkpoint.manifest import open_checkpoint
from moe_qlora.errors import CheckpointError


def some_tensors() -> dict[str, torch.Tensor]:
    found = {f"t.{i}": noise(dtype, 3, 5, seed=i) for i, dtype in enumerate(DTYPES.values())}
    return found | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 7),
        "one": noise(torch.int8, 1),
    }


def test_a_single_file_reads_as_safetensors_does(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / SINGLE)
    raw = (tmp_path / SINGLE).read_bytes()
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == set(tensors)
        assert len(checkpoint) == len(tensors)
        for key, tensor in tensors.items():
            info = checkpoint.info(key)
            assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
            assert same(checkpoint.read(key), tensor)
            content = tensor.flatten().view(torch.uint8).numpy().tobytes()
            assert raw[info.offset : info.offset + info.nbytes] == content
        for start, stop in ((0, 7), (0, 0), (1, 2), (2, None), (None, 2)):
            assert same(checkpoint.read("t.0", start, stop), tensors["t.0"][start:stop])


def test_a_single_file_beside_an_index_is_read_as_transformers_reads_it(tmp_path):
    tensors = two_shards(tmp_path)
    save_file({key: tensor.flip(0) for key, tensor in tensors.items()}, tmp_path / SINGLE)
    assert same(open_checkpoint(tmp_path).read("a"), tensors["a"].flip(0))
    (tmp_path / INDEX).rename(tmp_path / f"consolidated{INDEX_SUFFIX}")  # of another layout
    assert [file.name for file in open_checkpoint(tmp_path).files] == [SINGLE]
    index(tmp_path, dict.fromkeys(tensors, SINGLE))
    assert same(open_checkpoint(tmp_path).read("a"), tensors["a"].flip(0))


def test_a_folder_without_safetensors_is_named(tmp_path):
    for name, said in (
        ("notes.txt", "0 safetensors files and no index"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf, GGUF, which is never read"),
        ("pytorch_model.bin", "pytorch_model.bin, a pickle"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"\x80")
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)
    for missing, told in ((tmp_path / "missing", "is no folder"), ("x" * 5000, "too long")):
        with pytest.raises(CheckpointError, match=told):
            open_checkpoint(missing)


def test_missing_keys_files_and_doubles_are_named(tmp_path):
    two_shards(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor zz"):
        open_checkpoint(tmp_path).read("zz")
    save_file({"a": torch.ones(1)}, tmp_path / "m-4.safetensors")
    for files, said in (
        ({"a": 1, "b": 1}, r"m-1\.safetensors does not hold b"),
        ({"a": 1, "b": 3}, r"m-3\.safetensors"),
        ({"a": 1, "b": 2, "c": 4}, r"a is in m-1\.safetensors as well"),
    ):
        index(tmp_path, {key: f"m-{number}.safetensors" for key, number in files.items()})
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [*TRICKS[::3], "x" * 5000])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, name):
    outside, folder = tmp_path, tmp_path / "sub"
    two_shards(folder)
    save_file({"b": torch.ones(1)}, outside / SINGLE)
    (folder / "sub").mkdir()
    save_file({"b": torch.ones(1)}, folder / "sub" / SINGLE)
    index(folder, {"a": "m-1.safetensors", "b": name})
    with pytest.raises(CheckpointError, match=r"only files of the folder|too long"):
        open_checkpoint(folder)


def as_nobody(copied: Any, work: Callable[[], object]) -> str:
    """What `work` raises for a user whom file modes bind (not root): a CheckpointError's text."""
    reader, writer = os.pipe()

    def say() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            work()
        except CheckpointError as error:
            os.write(writer, str(error).encode())

    assert copied(say).ended() == 0
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


def test_what_may_not_be_read_or_written_is_named(copied):
    # pytest's own folders are closed to others
    with TemporaryDirectory() as place:
        root, plain, sharded = Path(place), Path(place) / "plain", Path(place) / "sharded"
        two_shards(sharded)
        two_shards(plain)
        (plain / f"model{INDEX_SUFFIX}").unlink()
        root.chmod(0o755)
        for folder in (plain, sharded):
            for mode, expected in ((0o444, "cannot be read"), (0o000, "0 safetensors files")):
                folder.chmod(mode)
                assert expected in as_nobody(copied, lambda folder=folder: open_checkpoint(folder))
        assert "cannot be written" in as_nobody(copied, lambda: new_folder(plain / "x").__enter__())
        sharded.chmod(0o755)
        for file in sharded.iterdir():
            file.chmod(0o644)
        for name in (f"model{INDEX_SUFFIX}", "m-2.safetensors"):
            (sharded / name).chmod(0)
            assert f"{name} cannot be read" in as_nobody(copied, lambda: open_checkpoint(sharded))
            (sharded / name).chmod(0o644)
        assert as_nobody(copied, lambda: open_checkpoint(sharded)) == ""
        plain.chmod(0o755)


def test_links_may_stay_in_the_folder_or_lead_to_the_blobs_of_a_cache(tmp_path):
    folder, elsewhere = tmp_path / "plain", tmp_path / "elsewhere.safetensors"
    two_shards(folder)
    link = (folder / "m-2.safetensors").rename(folder / "real.safetensors").with_stem("m-2")
    link.symlink_to("real.safetensors")
    assert "b" in open_checkpoint(folder)
    (folder / "real.safetensors").rename(elsewhere)
    link.unlink()
    link.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        open_checkpoint(folder)

    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    elsewhere.rename(blobs / "abcd")
    (snapshot / SINGLE).symlink_to("../../blobs/abcd")
    assert "b" in open_checkpoint(snapshot)
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(snapshot / SINGLE)  # a loop
    with pytest.raises(CheckpointError):
        open_checkpoint(snapshot)


WEIGHT_MAPS = (b'["m-1.safetensors"]', b'{"a": 1}', b'{"a": "x", "a": "y"}', b"{}")


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"\xff\xfe", b'{"a": ' * 100_000),
        *(b'{"weight_map": ' + value + b"}" for value in WEIGHT_MAPS),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    two_shards(tmp_path)
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["w"].update(dtype="F13"),
        lambda h: h["w"].update(shape=[2, 4]),
        lambda h: h["w"].update(shape=[2**62, 4]),
        lambda h: h["w"].update(shape=[-2, -3]),
        lambda h: h["w"].update(data_offsets=[8, 32]),
        lambda h: h["w"].pop("data_offsets"),
        lambda h: h.update(v=dict(h["w"])),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, change):
    file = tmp_path / SINGLE
    save_file({"w": noise(torch.float32, 2, 3)}, file)
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:end]), raw[end:]
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
TWICE = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
TWICE = b'{"w":' + TWICE + b',"w":' + TWICE + b"}"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        *((count, rf": download incomplete, {count} of \d+ bytes") for count in (0, 7, 20, 90)),
        (POINTER, "git lfs pull"),
        *(
            (length.to_bytes(8, "little") + b"{}", "cut off in its header")
            for length in (2**63, 2**40, 200 << 20)
        ),
        (len(TWICE).to_bytes(8, "little") + TWICE + bytes(8), ""),
    ],
)
def test_files_that_are_cut_off_or_none_are_refused(tmp_path, raw, said):
    file = tmp_path / SINGLE
    save_file({"w": noise(torch.float32, 2, 3)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:raw] if isinstance(raw, int) else raw)
    assert len(whole) > 90
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{said}"):
        read_header(file)


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


@pytest.mark.parametrize(
    ("place", "kind"), [(PARTIAL, "link"), (LOCK, "link"), (LOCK, "hard link"), (LOCK, "pipe")]
)
def test_staging_and_lock_are_no_way_to_other_files(tmp_path, place, kind):
    folder, planted = tmp_path / "precious", tmp_path / place
    folder.mkdir()
    (folder / "x").write_text("precious")
    if kind == "link":
        planted.symlink_to(folder if place == PARTIAL else folder / "x")
        with pytest.raises(CheckpointError, match="cannot be written"):
            build(tmp_path / "model")
    else:
        planted.hardlink_to(folder / "x") if kind == "hard link" else os.mkfifo(planted)
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
