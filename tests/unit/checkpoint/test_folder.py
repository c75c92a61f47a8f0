"""Files of a folder against safetensors' own reading and writing; tricks with paths; folders that
appear whole or not at all."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
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
    new_folder,
    replace_file,
)
from moe_qlora.checkpoint.manifest import open_checkpoint
from moe_qlora.errors import CheckpointError


def test_a_single_file_reads_as_safetensors_does(tmp_path):
    tensors = {f"t.{i}": noise(dtype, 3, 5, seed=i) for i, dtype in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7)}
    save_file(tensors, tmp_path / SINGLE)
    raw = (tmp_path / SINGLE).read_bytes()
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == set(tensors)
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


def holding(name: str, text: bytes = b"\x80") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text)


def sharded(**weight_map: object) -> Callable[[Path], object]:
    """Two shards, a third file, one beside the folder, and an index that names these files."""

    def write(folder: Path) -> None:
        two_shards(folder)
        save_file({"a": torch.ones(1)}, folder / "m-4.safetensors")
        save_file({"b": torch.ones(1)}, folder.parent / SINGLE)
        files = {
            k: f"m-{n}.safetensors" if isinstance(n, int) else n for k, n in weight_map.items()
        }
        index(folder, files)

    return write


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A file of one matrix, of which these are the bytes then."""

    def write(folder: Path) -> None:
        save_file({"w": noise(torch.float32, 2, 3)}, folder / SINGLE)
        (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))

    return write


def header(**fields: Any) -> Callable[[Path], object]:
    """The same with other fields of the matrix in the header."""

    def change(raw: bytes) -> bytes:
        end = 8 + int.from_bytes(raw[:8], "little")
        said = json.loads(raw[8:end])
        said["w"] |= fields
        text = json.dumps(said).encode()
        return len(text).to_bytes(8, "little") + text + raw[end:]

    return changed(change)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
CUT = r"model\.safetensors.*: download incomplete, \d+ of \d+ bytes"
UNREAD = [
    *((header(**lie), r"model\.safetensors") for lie in (
        {"dtype": "F13"}, {"shape": [2, 4]}, {"data_offsets": [8, 32]},
    )),
    *((changed(lambda raw, end=end: raw[:end]), CUT) for end in (7, 20, -1)),
    (changed(lambda raw: POINTER), r"model\.safetensors.*git lfs pull"),
    (changed(lambda raw: (200 << 20).to_bytes(8, "little") + b"{}"),
     r"model\.safetensors.*cut off in its header"),
    (holding("notes.txt"), "0 safetensors files and no index"),
    (holding("model-Q4_K_M.gguf"), "model-Q4_K_M.gguf, GGUF, which is never read"),
    (holding("pytorch_model.bin"), "pytorch_model.bin, a pickle"),
    (holding(INDEX, b"[]"), r"index\.json"),
    (lambda folder: folder.rmdir(), "is no folder"),
    (sharded(a=1, b=1), r"m-1\.safetensors does not hold b"),
    (sharded(a=1, b=3), r"m-3\.safetensors"),
    (sharded(a=1, b=2, c=4), r"a is in m-1\.safetensors as well"),
    *((sharded(a=1, b=name), "only files of the folder") for name in TRICKS),
    (sharded(a=1, b="x" * 5000), "too long"),
    *((sharded(**weight_map), r"index\.json") for weight_map in ({}, {"a": None})),
]  # fmt: skip


@pytest.mark.parametrize(("write", "said"), UNREAD, ids=map(str, range(len(UNREAD))))
def test_folders_that_are_not_read_are_named(tmp_path, write, said):
    folder = tmp_path / "sub"
    folder.mkdir()
    write(folder)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder)


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


WRAPPED = SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")
WRITE = "place/model cannot be written: .*"
FAILURES = [
    (KeyError("x"), KeyError, "x"),
    (OSError(errno.ENOSPC, FULL), CheckpointError, rf"{WRITE}{FULL}; make room there, or name"),
    (WRAPPED, CheckpointError, rf"{WRITE}{FULL} \(os error 28\); make room there"),
    (PermissionError(13, "Denied", "source/x"), CheckpointError, rf"{WRITE}Denied: 'source/x'"),
]


@pytest.mark.parametrize(("error", "kind", "said"), FAILURES)
def test_a_failure_leaves_nothing_and_names_what_could_not_be_read_or_written(
    tmp_path, error, kind, said
):
    with pytest.raises(kind, match=said):
        build(tmp_path / "place/model", error)
    assert names(tmp_path / "place") == []


@pytest.mark.parametrize("make", [lambda p: p.mkdir() or (p / "x").mkdir(), Path.touch,
                                  lambda p: p.symlink_to("other")])  # fmt: skip
def test_nothing_is_overwritten(tmp_path, make):
    make(tmp_path / "model")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match="exists and is no empty folder, or is a mount"):
        build(tmp_path / "model")
    assert names(tmp_path) == before


def test_staging_lock_and_files_are_no_way_to_others(tmp_path):
    other = tmp_path / "precious"
    other.mkdir()
    (other / "x").write_bytes(b"precious")
    for place, link in ((PARTIAL, other), (LOCK, other / "x")):
        (tmp_path / place).symlink_to(link)
        with pytest.raises(CheckpointError, match="cannot be written"):
            build(tmp_path / "model")
        (tmp_path / place).unlink()
    for link in ("link", ".f.partial"):
        (tmp_path / link).symlink_to(other / "x")
    for file, content in (("f", b"one"), ("f", b"two"), ("link", b"one")):
        replace_file(tmp_path / file, content)
        assert (tmp_path / file).read_bytes() == content
    assert (other / "x").read_bytes() == b"precious"
