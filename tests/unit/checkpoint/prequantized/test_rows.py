"""Whole folders, and rows that are read alone: values, what is read from disk, the memory."""

from __future__ import annotations

import pytest
import torch
from folders import same
from prequantized import CASES, write_shards
from torch.utils._python_dispatch import TorchDispatchMode

from moe_qlora.checkpoint import prequantized as makers
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.checkpoint.prequantized import PrequantizedCheckpoint, open_plain
from moe_qlora.errors import CheckpointError


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_that_of_the_plain_folder(folders, name):
    folder, plain = folders[name]
    with open_plain(folder) as checkpoint:
        assert isinstance(checkpoint, PrequantizedCheckpoint)
        assert set(checkpoint) == set(plain)
        for key, tensor in plain.items():
            info = checkpoint.info(key)
            assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape)), key
            assert info.nbytes == tensor.nbytes
            assert same(checkpoint.read(key), tensor), key
        assert len(checkpoint) == len(plain)
        with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
            checkpoint.read("model.nothing")
        count = sum(checkpoint.is_dequantized(key) for key in checkpoint)
        assert 4 <= count < len(plain)


def ranges(rows: int) -> list[tuple[int, int | None]]:
    """Rows that begin and end within blocks, at their edges, one row, none, and too many."""
    return [(3, rows - 1), (rows - 1, None), (0, 1), (15, 17), (17, rows + 9), (2, 2)]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_whole(folders, name, monkeypatch):
    with open_plain(folders[name][0]) as checkpoint:
        shapes = {checkpoint.info(key).shape: key for key in checkpoint}
        wholes = {key: checkpoint.read(key) for key in shapes.values()}
        for number, (key, whole) in enumerate(wholes.items()):
            # 50 values: less than a row, or one
            small = number % 2 and whole.numel() <= 1 << 16
            monkeypatch.setattr(makers, "PIECE", 50 if small else 1 << 22)
            for start, stop in ranges(whole.shape[0]):
                rows = checkpoint.read(key, start, stop)
                assert same(rows, whole[start:stop].contiguous()), (key, start, stop)


def test_only_the_rows_that_are_needed_are_read(folders, monkeypatch):
    """Bytes of codes and scales, not counting the last block, of which all rows share a scale."""
    read, counted = Checkpoint.read, {}

    def count(self, key, *args, **kwargs):
        tensor = counted[key] = read(self, key, *args, **kwargs)
        return tensor

    with open_plain(folders["deepseek_v3 fp8"][0]) as checkpoint:
        monkeypatch.setattr(Checkpoint, "read", count)
        for key in [key for key in checkpoint if checkpoint.is_dequantized(key)][:40]:
            checkpoint.read(key, 1, 2)
            codes, scale = (checkpoint.parts(key)[role] for role in ("codes", "scale"))
            rows = checkpoint.info(key).shape[0]
            assert counted[codes].nbytes * rows == checkpoint.stored[codes].nbytes
            assert len(counted[scale]) == 1


class Largest(TorchDispatchMode):
    """Notes the largest fp32 tensor that operations made."""

    float32 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.float32 = max(self.float32, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["deepseek_v3 fp8", "gpt_oss mxfp4", "deepseek_v3 int4"])
def test_a_piece_is_in_fp32_at_a_time(folders, name, monkeypatch):
    monkeypatch.setattr(makers, "PIECE", 1024)
    with open_plain(folders[name][0]) as checkpoint:
        for key in filter(checkpoint.is_dequantized, checkpoint):
            info = checkpoint.info(key)
            with Largest() as largest:
                checkpoint.read(key)
            # words and bytes are unpacked whole, which may be a little more than the columns
            assert 0 < largest.float32 <= max(1024, 2 * max(info.shape[-2:])) + 256, key


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_decodes_the_same_bits(folders, name):
    with open_plain(folders[name][0]) as checkpoint:
        for key in checkpoint:
            on_gpu = checkpoint.read(key, 1, device="cuda")
            assert on_gpu.is_cuda
            assert same(on_gpu.cpu(), checkpoint.read(key, 1)), key


@pytest.mark.gpu
def test_a_gpu_takes_little_more_than_the_plain_tensor(tmp_path):
    """An expert of gpt-oss-20b's width: codes, scales, the result, and a piece in fp32."""
    codes = torch.randint(0, 256, (2, 5760, 90, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 5760, 90), dtype=torch.uint8)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    write_shards(tmp_path, {"e_blocks": codes, "e_scales": scales})
    with open_plain(tmp_path) as checkpoint:
        checkpoint.read("e", 0, 1, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = checkpoint.read("e", device="cuda")
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < value.nbytes + codes.nbytes + scales.nbytes + (96 << 20)
