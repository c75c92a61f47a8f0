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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.errors import MoeQloraError
from moe_qlora.testing import run_distributed, tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
NF4 |= {"bnb_4bit_compute_dtype": "float32"}
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "vocab_size": 256}
FP4 = NF4 | {"bnb_4bit_quant_type": "fp4"}
PLAIN_ABSMAX = NF4 | {"bnb_4bit_use_double_quant": False}
BF16 = NF4 | {"bnb_4bit_compute_dtype": "bfloat16"}
IDS = torch.arange(16).view(2, 8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, an equal copy, and one in which a single weight differs."""
    root = tmp_path_factory.mktemp("agreement")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(root / "one")  # type: ignore[operator]
    for copy in ("copy", "other"):
        shutil.copytree(root / "one", root / copy)
    file = root / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][5, 7] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return root


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes})


def sharded(folder: Path, settings: dict[str, Any], config: LoraConfig | None = None) -> Any:
    return moe_qlora.load_sharded(folder, settings, lora_config=config)


def from_pretrained(folder: Path, settings: dict[str, Any], **config: int) -> Any:
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(**settings),
            distributed_config=DistributedConfig(**config),
        )


def packed(folder: Path, settings: dict[str, Any]) -> Any:
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**settings)
        )


def divided(folder: Path, settings: dict[str, Any], config: LoraConfig | None = None) -> Any:
    model = moe_qlora.expert_parallel(packed(folder, settings), init_device_mesh("cpu", (2,)))
    return model if config is None else moe_qlora.get_peft_model(model, config, experts=True)


def ddp(folder: Path, settings: dict[str, Any], config: LoraConfig | None = None) -> Any:
    model: nn.Module = moe_qlora.get_peft_model(
        packed(folder, settings), config or lora(), experts=True
    )
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
    model.eval()
    return model(input_ids=IDS)


Case = tuple[Callable[..., Any], list[tuple[Any, ...]], dict[str, int], str]
CASES: dict[str, Case] = {
    "sharded, copies": (sharded, [("one", NF4), ("copy", NF4)], {}, ""),
    "sharded, folder": (sharded, [("one", NF4), ("other", NF4)], {}, "model.safetensors of the"),
    "sharded, missing": (sharded, [("one", NF4), ("no", NF4)], {}, "rank 1 failed"),
    "sharded, codec": (sharded, [("one", NF4), ("one", FP4)], {}, "bnb_4bit_quant_type 'fp4'"),
    "sharded, nested": (sharded, [("one", NF4), ("one", PLAIN_ABSMAX)], {}, "use_double_quant"),
    "sharded, compute": (sharded, [("one", NF4), ("one", BF16)], {}, "compute_dtype 'bfloat16'"),
    "sharded, adapter": (
        sharded,
        [("one", NF4, lora()), ("one", NF4, lora(lora_alpha=8))],
        {},
        "lora_config.lora_alpha 8, and rank 0 has 4",
    ),
    "fsdp, codec": (from_pretrained, [("one", NF4), ("one", FP4)], {"fsdp_size": 2}, "fp4"),
    "ep, folder": (
        from_pretrained,
        [("one", NF4), ("other", NF4)],
        {"fsdp_size": 2, "ep_size": 2},
        "model.safetensors of the checkpoint",
    ),
    "divided, codec": (divided, [("one", NF4), ("one", FP4)], {}, "codec of packed experts"),
    "divided, folder": (divided, [("one", NF4), ("one", NF4)], {}, ""),
    "divided, adapter": (divided, [("one", NF4, lora()), ("one", NF4, lora(r=4))], {}, ".r 4"),
    "ddp": (ddp, [("one", NF4), ("copy", NF4)], {}, ""),
    "ddp, codec": (ddp, [("one", NF4), ("one", FP4)], {}, "codec of"),
    "ddp, adapter": (
        ddp,
        [("one", NF4, lora()), ("one", NF4, lora(lora_alpha=8))],
        {},
        "lora_alpha 8, and rank 0 has 4",
    ),
}


def run(rank: int, world: int, root: Path) -> dict[str, str]:
    said = {}
    for name, (call, given, options, _) in CASES.items():
        folder, *rest = given[rank]
        try:
            call(root / folder, *rest, **options)
            said[name] = ""
        except MoeQloraError as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def said(folders: Path) -> list[dict[str, str]]:
    return run_distributed(run, 2, folders)


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_by_all_ranks(said: list[dict[str, str]], case: str) -> None:
    expected = CASES[case][3]
    for one in said:
        if expected:
            assert "rank 1" in one[case] or ("missing" in case and "no is no folder" in one[case])
            assert expected in one[case] or "missing" in case
        else:
            assert one[case] == ""
