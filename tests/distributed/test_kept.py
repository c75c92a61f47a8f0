"""Experts that keep their checkpoint's MXFP4 codes, sharded over two ranks.

Two processes serve every case.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.manifest import read_manifest
from moe_qlora.testing import run_distributed, tiny_inputs
from tests.helpers.mxfp4 import write_gpt_oss
from tests.helpers.ranks import said, sharded

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
pytestmark = pytest.mark.nightly  # nf4 and int8 are sharded alike in every run


def load(folder: Path, **named: Any) -> Any:
    config = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.float32)
    with moe_qlora.enabled(keep_codes=True):
        return AutoModelForCausalLM.from_pretrained(
            folder / "maker", quantization_config=config, dtype=torch.float32, **named
        )


def losses_of(model: Any, shard: bool = False) -> list[float]:
    """Give a model LoRA, shard it where asked, and train two steps on the same tokens."""
    inputs = tiny_inputs(model)
    inputs["labels"] = inputs["input_ids"]
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    peft_model: Any = moe_qlora.get_peft_model(model, config, experts=True)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name and "experts" not in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    if shard:
        sharded(peft_model)
    optimizer = torch.optim.SGD([p for p in peft_model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(2):
        loss = peft_model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run_cases(rank: int, world: int, root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = load(root)
    model.save_pretrained(root / "replicated")
    results["sharded"] = losses_of(model, shard=True)
    results["refused"] = said(load, root, distributed_config=DistributedConfig(fsdp_size=world))
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept")
    write_gpt_oss(path, hidden_size=64, intermediate_size=96, num_local_experts=4)
    return path


@pytest.fixture(scope="module")
def ranks(root: Path) -> Any:
    return run_distributed(run_cases, 2, root)


def test_trains_as_one_process_does(root: Path, ranks: Any) -> None:
    expected = losses_of(load(root))
    assert expected[1] != expected[0]
    for rank in ranks:
        assert rank["sharded"] == pytest.approx(expected, rel=1e-4)


def test_all_ranks_together_save_the_same_folder(root: Path, ranks: Any) -> None:
    load(root).save_pretrained(root / "single")
    manifests = [read_manifest(root / name) for name in ("single", "replicated")]
    assert {manifest.version for manifest in manifests if manifest} == {3}
    assert len({manifest.id for manifest in manifests if manifest}) == 1


def test_a_load_that_shards_while_it_reads_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert rank["refused"].startswith("CheckpointError: ")
        assert "keeps the MXFP4 codes of its checkpoint" in rank["refused"]
        assert "fully_shard the model after it is loaded" in rank["refused"]
