"""A save that is killed leaves the old model or the new one, and the next one is as if never."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import check_folder, contents
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import quantize_experts
from moe_qlora.checkpoint import staging
from moe_qlora.checkpoint.manifest import CONFIG
from moe_qlora.checkpoint.staging import left_behind
from moe_qlora.errors import CheckpointError
from moe_qlora.testing import tiny_model

KILLED = 9
REFUSED = 10
FOREIGN = {"tokenizer.json": b"{}", "notes/log": b"kept"}
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copytree"}


class Saves:
    """Two models of one shape, and the folders that undisturbed saves of them are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = [self._packed(seed) for seed in (0, 1)]
        self.sizes = ("20KB", "25KB")
        for number in (0, 1):
            self.save(number, self.fresh(number))

    @staticmethod
    def _packed(seed: int) -> Any:
        model: Any = tiny_model("qwen3_moe", seed=seed, dtype=torch.bfloat16, num_hidden_layers=1)
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
        quantize_experts(model, config)
        return model

    def fresh(self, number: int) -> Path:
        return self.root / f"fresh{number}"

    def save(self, number: int, folder: Path) -> None:
        self.models[number].save_pretrained(folder, max_shard_size=self.sizes[number])

    def start(self, folder: Path, *, existing: bool) -> None:
        """The folder as it is before a save: absent, or with the first model and foreign files."""
        shutil.rmtree(folder, ignore_errors=True)
        if existing:
            shutil.copytree(self.fresh(0), folder)
            for name, content in FOREIGN.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)


def staged(folder: Path) -> list[Path]:
    """Staging folders; the lock file of a process that was killed at its very end may be left."""
    return [path for path in left_behind(folder) if path.suffix == ".partial"]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saves]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Saves(tmp_path_factory.mktemp("saves"))


def die() -> None:
    os._exit(KILLED)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def counting(root: Path, stop: int, report: int, act: Callable[[], None] = die) -> None:
    """End this process, or `act`, just before its `stop`-th change of the disk below `root`.

    Of tensors, which all go to the end of a file that nobody reads yet, every fourth is a change.
    The number of changes so far is written to the file `report`, 8 bytes each time.
    """
    count = tensors = 0

    def tick() -> None:
        nonlocal count
        count += 1
        os.pwrite(report, count.to_bytes(8, "little"), 0)
        if count == stop:
            act()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in _EVENTS) and str(root) in str(args[0]):
            tick()

    flush, put = os.fsync, staging.ShardWriter._put

    def fsync(handle: int) -> None:
        tick()
        flush(handle)

    def write(self: Any, *args: Any) -> None:
        nonlocal tensors
        if tensors % 4 == 0:
            tick()
        tensors += 1
        put(self, *args)
        self._file.flush()

    os.fsync, staging.ShardWriter._put = fsync, write
    sys.addaudithook(hook)


def judge(saves: Saves, folder: Path, *, existing: bool) -> str:
    """Which save the folder holds; fails where it is neither."""
    if not folder.exists():
        assert not existing
        return "none"
    manifest = check_folder(folder)
    found = contents(folder)
    for number, name in enumerate(("old", "new")):
        want = contents(saves.fresh(number))
        if found[CONFIG] != want[CONFIG]:
            continue
        shards = {file for file in want if file.endswith(".safetensors")}
        assert set(manifest.shards) == shards
        assert all(found[file] == want[file] for file in shards)
        assert found[manifest.file_name] == want[manifest.file_name] == manifest.to_bytes()
        if existing:
            assert FOREIGN.items() <= found.items()
            return name
        assert found == want
        return name
    raise AssertionError("config.json is of neither save")


def saved_again(saves: Saves, folder: Path, *, existing: bool) -> None:
    saves.save(1, folder)
    assert contents(folder) == contents(saves.fresh(1)) | (FOREIGN if existing else {})
    assert not staged(folder)


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "existing folder"])
def test_killed_before_each_change_of_the_disk(saves, copied, tmp_path, existing):
    folder = tmp_path / "model"
    report = os.open(tmp_path / "count", os.O_RDWR | os.O_CREAT)
    total, stop, seen = 10**6, 0, []
    while stop < total:
        stop += 1
        saves.start(folder, existing=existing)

        def work(stop: int = stop) -> None:
            counting(folder.parent / "", stop, report)
            saves.save(1, folder)

        status = copied(work).ended()
        assert status in (0, KILLED)
        if status == 0:
            total = int.from_bytes(os.pread(report, 8, 0), "little")
            assert total == stop - 1
        seen.append(judge(saves, folder, existing=existing))
        if seen[-1] == "new" and seen.count("new") == 1:
            with moe_qlora.enabled():
                again = AutoModelForCausalLM.from_pretrained(folder)
            state = saves.models[1].state_dict()
            assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
        if stop % 8 == 0 or seen[-1] == "new":
            saved_again(saves, folder, existing=existing)
    os.close(report)
    # Everything in its order, and nothing twice: old (or none), then new.
    order = ["old", "new"] if existing else ["none", "new"]
    assert list(dict.fromkeys(seen)) == order
    assert seen == sorted(seen, key=order.index)
    assert len(seen) > 30


def test_a_disk_that_fails_at_each_change_is_reported_and_leaves_no_rubbish(
    saves, copied, tmp_path
):
    folder, existing = tmp_path / "model", True
    report = os.open(tmp_path / "count", os.O_RDWR | os.O_CREAT)
    done, stop, outcomes, stuck = 10**6, 0, [], 0
    while stop < done:
        stop += 1
        saves.start(folder, existing=existing)

        def work(stop: int = stop) -> None:
            counting(folder.parent / "", stop, report, disk_full)
            try:
                saves.save(1, folder)
            except CheckpointError as error:
                if "No space left" in str(error) and str(folder) in str(error):
                    os._exit(REFUSED)

        status = copied(work).ended()
        assert status in (0, REFUSED), f"at change {stop}"
        holds = judge(saves, folder, existing=existing)
        if status == 0:
            assert holds == "new", f"at change {stop}"
            changes = int.from_bytes(os.pread(report, 8, 0), "little")
            done = stop if changes < stop else done
        outcomes.append((status, holds))
        if staged(folder):  # its removal was what failed: the next save removes it
            stuck += 1
            saved_again(saves, folder, existing=existing)
        if stop % 10 == 0:
            saved_again(saves, folder, existing=existing)
    os.close(report)
    refused = [holds for status, holds in outcomes if status == REFUSED]
    assert refused.count("old") > 15
    # the rest are folders that exist already, and files removed at the end
    assert len(refused) > 0.7 * len(outcomes)
    assert stuck <= 1
