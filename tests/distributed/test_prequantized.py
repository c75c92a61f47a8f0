"""Folders that their makers quantized, loaded a share at a time: as their 16-bit folders are.

Two processes serve every case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.testing import run_distributed
from tests.helpers.prequantized import write_both
from tests.helpers.ranks import CountedReads, are_same, said, sharded, tensors_of
from tests.helpers.training import NF4

FP8, MXFP4, NVFP4 = "deepseek_v3 fp8", "gpt_oss mxfp4", "qwen3_moe modelopt nvfp4"
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "int8": {"load_in_8bit": True},
    # parameters that are dequantized, and sharded as they are
    "skips": {**NF4, "llm_int8_skip_modules": ["self_attn", "layers.1.mlp", "lm_head"]},
}
CASES = (  # the folder, how its model is divided, the settings
    (FP8, "fsdp", "skips"),
    (NVFP4, "fsdp", "int8"),
    (FP8, "load_sharded", "skips"),
    (MXFP4, "load_sharded", "int8"),
)


def load(folder: Path, way: str, kind: str, ranks: int) -> dict[str, Any]:
    config = BitsAndBytesConfig(**SETTINGS[kind])
    info: dict[str, Any] = {}
    with moe_qlora.enabled(), CountedReads() as reads:
        if way == "load_sharded":
            model = moe_qlora.load_sharded(folder, config)
        else:
            asked = DistributedConfig(fsdp_size=ranks)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=config, output_loading_info=True,
                distributed_config=asked,
            )  # fmt: skip
    return {
        "tensors": tensors_of(model),
        "read": reads.total,
        "info": {name: sorted(keys) for name, keys in info.items()},
        "is_sharded": isinstance(model, FSDPModule),
        "config": model.config.quantization_config.to_dict(),
    }


def kept(root: Path, **named: Any) -> Any:
    """The model whose experts keep their MXFP4 codes."""
    folder = root / MXFP4 / "maker"
    with moe_qlora.enabled(keep_codes=True):
        config = BitsAndBytesConfig(**NF4)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **named)


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
    return result.detach()


def run_cases(rank: int, world: int, root: Path) -> dict[Any, Any]:
    asked = DistributedConfig(fsdp_size=world)
    results: dict[Any, Any] = {"kept": logits(sharded(kept(root)))}
    results["refused"] = said(kept, root, distributed_config=asked)
    return results | {
        (*case, name): load(root / case[0] / name, *case[1:], world)
        for case in CASES
        for name in ("maker", "plain")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("makers")
    for folder in (FP8, MXFP4, NVFP4):
        write_both(path / folder, folder)
    return path


@pytest.fixture(scope="module")
def ranks(root: Path) -> Any:
    return run_distributed(run_cases, 2, root)


@pytest.mark.parametrize("case", CASES)
def test_shares_are_those_of_the_plain_folder(ranks, root, case):
    with Checkpoint(sorted((root / case[0] / "maker").glob("*.safetensors"))) as files:
        keys = [key for key in files if ".experts." in key and "layers.2." not in key]
        stored = sum(files.info(key).nbytes for key in keys)
    for rank in ranks:
        maker, plain = rank[*case, "maker"], rank[*case, "plain"]
        assert are_same(maker["tensors"], plain["tensors"])
        for field in ("info", "config", "is_sharded"):
            assert maker[field] == plain[field]
        assert maker["is_sharded"]
        assert maker["read"] < 0.65 * stored  # its share of codes alone


def test_kept_codes_are_sharded_after_the_load_alone(ranks: Any, root: Path) -> None:
    expected = logits(kept(root))
    for rank in ranks:
        assert torch.equal(rank["kept"], expected)
        assert rank["refused"].startswith("CheckpointError: ")
        assert "keeps the MXFP4 codes of its checkpoint" in rank["refused"]
        assert "fully_shard the model after it is loaded" in rank["refused"]
