"""Ranks that were given different things are told apart before anything is read or computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.ranks import said

NF4 = training.NF4 | {"bnb_4bit_compute_dtype": "float32"}
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "vocab_size": 256}
FP4 = NF4 | {"bnb_4bit_quant_type": "fp4"}
IDS = torch.arange(16).view(2, 8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, an equal copy, and one in which a single weight differs."""
    root = tmp_path_factory.mktemp("agreement")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(root / "one")  # type: ignore[operator]
    for name in ("copy", "other"):
        shutil.copytree(root / "one", root / name)
    file = root / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][5, 7] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return root


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes})


def sharded(folder: Path, settings: dict[str, Any], config: LoraConfig | None = None) -> Any:
    return moe_qlora.load_sharded(folder, settings, lora_config=config)


def packed(folder: Path, settings: dict[str, Any], ranks: int = 1) -> Any:
    asked = {} if ranks == 1 else {"distributed_config": DistributedConfig(fsdp_size=ranks)}
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**settings), **asked
        )


def ddp(folder: Path, settings: dict[str, Any], group: Any = None) -> Any:
    model: nn.Module = moe_qlora.get_peft_model(packed(folder, settings), lora(), experts=True)
    model = DistributedDataParallel(model, process_group=group)
    model(input_ids=IDS, labels=IDS).loss.backward()


def grouped(folder: Path, settings: dict[str, Any]) -> Any:
    """Steps under DDP of groups of one rank each."""
    groups = [distributed.new_group([rank]) for rank in range(2)]
    ddp(folder, settings, groups[distributed.get_rank()])


# case -> (call, what rank 0 and rank 1 are given, what is said)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], str]] = {
    "sharded, folder": (sharded, ("one", NF4), ("other", NF4), "model.safetensors of the"),
    "sharded, adapter": (
        sharded, ("one", NF4, lora()), ("one", NF4, lora(lora_alpha=8)),
        "lora_config.lora_alpha 8, and rank 0 has 4",
    ),
    "fsdp, codec": (packed, ("one", NF4, 2), ("one", FP4, 2), "fp4"),
    "ddp": (ddp, ("one", NF4), ("copy", NF4), ""),
    "ddp, codec": (ddp, ("one", NF4), ("one", FP4), "codec of"),
    "ddp, own groups": (grouped, ("one", NF4), ("one", FP4), ""),
}  # fmt: skip


def run(rank: int, world: int, root: Path) -> dict[str, str]:
    texts = {}
    for name, (call, *given, _) in CASES.items():
        folder, *rest = given[rank]
        texts[name] = said(call, root / folder, *rest)
    return texts


@pytest.fixture(scope="module")
def ranks(folders: Path) -> list[dict[str, str]]:
    return run_distributed(run, 2, folders)


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_by_all_ranks(ranks: list[dict[str, str]], case: str) -> None:
    expected = CASES[case][3]
    for one in ranks:
        assert expected in one[case] and ("rank 1" in one[case]) == bool(one[case] or expected)
