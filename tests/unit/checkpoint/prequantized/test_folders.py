"""Whole folders, as makers write them, against the plain tensors that they stand for."""

from __future__ import annotations

import pytest
from folders import same
from prequantized import CASES

from moe_qlora.checkpoint.prequantized import PrequantizedCheckpoint, open_plain


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
        count = sum(checkpoint.is_dequantized(key) for key in checkpoint)
        assert 4 <= count < len(plain)
