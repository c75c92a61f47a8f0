"""Manifests of packed folders: what they say, and what they are refused for."""

import json
from functools import reduce
from pathlib import Path

import pytest
import torch
from folders import TRICKS, check_folder, noise, same
from safetensors.torch import save_file

from moe_qlora.checkpoint.folder import SINGLE
from moe_qlora.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    PackedEntry,
    manifest_name,
    open_checkpoint,
    read_manifest,
    write_packed,
)
from moe_qlora.errors import CheckpointError
from moe_qlora.packing.settings import CodecSettings


def packed_folder(folder: Path) -> Manifest:
    """An int8 expert weight `w` and a plain tensor `b`, in two shards."""
    folder.mkdir(exist_ok=True)
    tensors = {"w": noise(torch.int8, 2, 3, 4), "w.SCB": torch.ones(6), "b": torch.ones(3)}
    (folder / "config.json").write_text('{"model_type": "toy"}')
    experts = {"w": PackedEntry((2, 3, 4), "bfloat16")}
    settings = CodecSettings("int8")
    return write_packed(folder, tensors.items(), 36, experts, settings, torch.nn.Module())


def manifest_of(folder: Path) -> Path:
    [file] = [file for file in folder.iterdir() if MANIFEST_NAME.fullmatch(file.name)]
    return file


def remark(folder: Path, **changes: object) -> None:
    """Change what config.json says of the manifest."""
    config = json.loads((folder / "config.json").read_text())
    config["moe_qlora"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def resigned(folder: Path, change) -> None:
    """Change the manifest's JSON, and put its name and config.json right again."""
    value = json.loads(manifest_of(folder).read_bytes())
    change(value)
    manifest_of(folder).unlink()
    text = json.dumps(value).encode()
    (folder / manifest_name(text)).write_bytes(text)
    remark(folder, manifest=manifest_name(text))


def test_a_manifest_reads_back_equal_and_says_the_same_twice(tmp_path):
    manifest = packed_folder(tmp_path / "a")
    assert read_manifest(tmp_path / "a") == manifest == check_folder(tmp_path / "a")
    assert check_folder(tmp_path / "a", checksums=False) == manifest
    assert packed_folder(tmp_path / "b") == manifest
    one, other = (manifest_of(tmp_path / name) for name in "ab")
    assert one.name == other.name == manifest.file_name
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(CheckpointError, match="not packed by moe_qlora"):
        check_folder(tmp_path)


def test_a_folder_opens_by_what_its_config_names(tmp_path):
    manifest = packed_folder(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / SINGLE)  # not named by anything
    (tmp_path / "moe_qlora-0123456789abcdef.json").write_text("{")  # nor this
    with open_checkpoint(tmp_path) as checkpoint:
        assert tuple(checkpoint) == tuple(manifest.tensors)
        assert [file.name for file in checkpoint.files] == list(manifest.shards)
        assert same(checkpoint.read("w", 1), noise(torch.int8, 2, 3, 4)[1:])
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')  # a plain save over it
    assert tuple(open_checkpoint(tmp_path)) == ("x",)


MARKS = [
    ([], r"moe_qlora.format_version \[\]; this version"),
    ({"format_version": 1, "id": "x"}, "format_version 1; .* pack the model again"),
    ({"format_version": 4}, "format_version 4"),
    ({"entry": None}, "moe_qlora.entry is None"),
    ({"manifest": f"moe_qlora-{'0' * 16}.json"}, "is missing"),
    ({"x": 1}, "moe_qlora.x is 1"),
]


@pytest.mark.parametrize(("mark", "pattern"), MARKS)
def test_a_mark_that_does_not_fit_is_refused_by_its_key(tmp_path, mark, pattern):
    packed_folder(tmp_path)
    if mark and "format_version" not in mark:
        remark(tmp_path, **mark)
    else:
        (tmp_path / "config.json").write_text(json.dumps({"moe_qlora": mark}))
    for read in (check_folder, open_checkpoint):
        with pytest.raises(CheckpointError, match=pattern):
            read(tmp_path)


def within(*path: str, **values: object):
    """Return what sets values at a place of the manifest."""
    return lambda value: reduce(lambda part, key: part[key], path, value).update(values)


W, B = ("experts", "w"), ("tensors", "b")
RESIGNED = [
    (within(shards={}), r"shards is \{\}"),
    *((within("shards", **{name: {}}), "only files of the folder") for name in TRICKS[::4]),
    (within("codec", kind="nf3"), "nf3"),
    (lambda v: v["tensors"].pop("b"), "hold b as"),
    (lambda v: v["tensors"].update(c=v["tensors"]["b"]), "hold c as None"),
    (within(*B, dtype="F16"), "hold b as"),
    (within(*W, shape=[-2, -3, 4]), r"experts\.w\.shape\.0 is -2"),
    (within(*W, dtype="save"), r"experts\.w\.dtype is 'save'.*bfloat16"),
    (within("tensors", "w", sha256="0" * 64), "the bytes of w are not"),
    (within(sha256="0"), "sha256 is '0'"),
]


@pytest.mark.parametrize(("change", "pattern"), RESIGNED, ids=map(str, range(len(RESIGNED))))
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, change, pattern):
    packed_folder(tmp_path)
    resigned(tmp_path, change)
    with pytest.raises(CheckpointError, match=pattern):
        check_folder(tmp_path)


def test_a_changed_manifest_and_lost_files_are_refused(tmp_path):
    manifest = packed_folder(tmp_path)
    file = manifest_of(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"toy", b"top"))
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged: its name is not that of"):
        read_manifest(tmp_path)
    for name in (file.name, list(packed_folder(tmp_path / "b").shards)[1]):
        (folder := tmp_path if name == file.name else tmp_path / "b").joinpath(name).unlink()
        with pytest.raises(CheckpointError, match=rf"{name} is missing: copy the whole folder"):
            open_checkpoint(folder)
    assert manifest.file_name == file.name
