"""A rank that is killed ends the others with an error, and leaves what was saved before as it was.

Ranks are forked from this process, which has imported everything and loaded the model.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.checkpoint.folder import left_behind
from moe_qlora.distributed import gather
from moe_qlora.testing import tiny_model
from tests.helpers import training
from tests.helpers.folders import check_folder
from tests.helpers.ranks import SIZES, sharded
from tests.helpers.training import adamw, adapted, restore, state_of, token_batches, train

WORLD, TIMEOUT = 3, 5.0
KILLED = -signal.SIGKILL


class Ranks:
    """Runs functions on forked ranks of one packed model, and keeps what each rank raised."""

    def __init__(self, root):
        self.root, self.runs, self.timeout = root, 0, TIMEOUT
        self.model = training.packed("qwen3_moe", **SIZES)

    def run(self, job, *args):
        """Return how ranks ended, what they said, and how long it took."""
        self.runs += 1
        folder = self.root / f"run{self.runs}"
        folder.mkdir()
        begin, pids = time.monotonic(), []
        for rank in range(WORLD):
            pid = os.fork()
            if not pid:
                self.become(rank, folder, job, args)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [folder / str(rank) for rank in range(WORLD)]
        texts = [file.read_text() if file.exists() else "" for file in said]
        return codes, texts, time.monotonic() - begin

    def become(self, rank, folder, job, args):
        code = 1
        try:
            store, timeout = (folder / "store").as_uri(), timedelta(seconds=self.timeout)
            distributed.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout
            )
            text = job(self.model, rank, *args)
            code = 0
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this rank's report
            text = f"{type(error).__name__}: {error}"
        (folder / str(rank)).write_text(str(text))
        sys.stdout.flush()
        os._exit(code)


def die_at(owner, name, count):
    """Let this process kill itself in its n-th call of a function."""
    stock, left = getattr(owner, name), [count]

    def counted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*args, **kwargs)

    setattr(owner, name, counted)
    return left


def save(model, rank, folder, victim=None, count=0, adapter=False):
    """One rank dies when it gathers its n-th tensor; with no count, it does not take part."""
    model = sharded(adapted(model) if adapter else moe_qlora.prepare_sharding(model))
    if rank == victim and not count:
        time.sleep(2.5)
        return "never came"
    if rank == victim:
        die_at(gather, "whole", count)
    model.save_pretrained(folder)
    return "saved"


def load(model, rank, folder, victim):
    left = die_at(distributed, "all_gather", 2 if rank == victim else 0)
    settings = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(**settings, llm_int8_skip_modules=["self_attn", "lm_head"])
    loaded = moe_qlora.load_sharded(folder, config, dtype=torch.float32)
    assert left[0] < -2
    ids = torch.arange(8)[None]
    with torch.no_grad():
        return f"loaded, loss {loaded(input_ids=ids, labels=ids).loss.item():.6f}"


def train_and_die(model, rank, folder):
    model = sharded(adapted(model))
    optimizer = adamw(model, foreach=False)
    train(model, token_batches(0, 2, 6), rank, WORLD, optimizer=optimizer)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    if rank == 1:
        model.get_base_model().model.layers[1].register_forward_pre_hook(
            lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        )
    train(model, token_batches(2, 4, 6), rank, WORLD, optimizer=optimizer)


def resume(model, rank, folder):
    model = sharded(adapted(model))
    optimizer = adamw(model, foreach=False)
    restore(model, optimizer, folder)
    return train(model, token_batches(2, 4, 6), rank, WORLD, optimizer=optimizer)


def one_process(model, rank):
    return [] if rank else train(adapted(model), token_batches(0, 4, 6))[2:]


def shown(folder):
    files = (file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return Ranks(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(("victim", "count", "adapter"), [(0, 9, False), (2, 5, True)])
def test_a_rank_killed_while_a_model_or_an_adapter_is_saved(
    ranks, tmp_path, victim, count, adapter
):
    folder, what = tmp_path / "model", "the adapter to" if adapter else "to"
    assert ranks.run(save, folder, None, 0, adapter)[1] == ["saved"] * WORLD
    # so that a save that went through would show
    config = folder / ("adapter_config.json" if adapter else "config.json")
    config.write_text(config.read_text() + "\n")
    before = shown(folder)
    codes, texts, seconds = ranks.run(save, folder, victim, count, adapter)
    assert codes == [KILLED if rank == victim else 1 for rank in range(WORLD)]
    for rank in {0, 1, 2} - {victim}:
        assert f"CheckpointError: Saving {what} {folder} failed on rank {rank}" in texts[rank]
        assert "every rank must take part to the end" in texts[rank]
        assert len(texts[rank].splitlines()) == 1
    assert seconds < 4 * TIMEOUT
    assert shown(folder) == before
    if not adapter:
        check_folder(folder)
    assert ranks.run(save, folder, None, 0, adapter)[1] == ["saved"] * WORLD
    assert shown(folder) != before and left_behind(folder) == []


def test_a_rank_killed_while_a_model_is_loaded(ranks, tmp_path):
    tiny_model("qwen3_moe", **SIZES).save_pretrained(tmp_path)
    codes, texts, seconds = ranks.run(load, tmp_path, 1)
    assert codes == [1, KILLED, 1]
    for rank in (0, 2):
        assert texts[rank].startswith("QuantizationError: Packing model.layers.0.")
        assert f"failed on rank {rank} while it gathered absmax from all ranks" in texts[rank]
        assert texts[rank].endswith("every rank must take part to the end; load the model again.")
        assert len(texts[rank].splitlines()) == 1
    assert seconds < 6 * TIMEOUT
    codes, texts, _ = ranks.run(load, tmp_path, None)
    assert codes == [0] * WORLD, texts
    assert texts[0].startswith("loaded, loss 5.") and len(set(texts)) == 1


def test_a_rank_that_does_not_come_ends_the_others_after_the_timeout(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "timeout", 1.5)
    codes, texts, seconds = ranks.run(save, tmp_path / "model", 1)
    assert codes == [1, 0, 1]
    for rank in (0, 2):
        assert f"failed on rank {rank} while it gathered tensors from all ranks" in texts[rank]
    assert 1.5 < seconds < 6 * TIMEOUT
    assert not (tmp_path / "model").exists() and left_behind(tmp_path / "model") == []


def test_a_rank_killed_in_training_ends_the_others_and_the_next_run_resumes(ranks, tmp_path):
    codes, texts, seconds = ranks.run(train_and_die, tmp_path / "checkpoint")
    assert codes == [1, KILLED, 1]
    assert all(texts[rank].startswith("RuntimeError") for rank in (0, 2))
    assert seconds < 6 * TIMEOUT
    codes, texts, _ = ranks.run(resume, tmp_path / "checkpoint")
    assert codes == [0] * WORLD, texts
    expected = json.loads(ranks.run(one_process)[1][0])
    for text in texts:
        assert json.loads(text) == pytest.approx(expected, abs=1e-5)
