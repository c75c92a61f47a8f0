"""A model that transformers divides by a DistributedConfig: trained, saved, and refused in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.reader import Checkpoint
from moe_qlora.errors import MoeQloraError
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.training import whole

NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "vocab_size": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ep") / "model"
    tiny_model("qwen3_moe", **SIZES).save_pretrained(path)  # type: ignore[operator]
    return path


def load(folder: Path, **kwargs: Any) -> Any:
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**NF4), **kwargs
        )


def adapted(model: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    return moe_qlora.get_peft_model(model, config, experts=True)


def run_saving(rank: int, world: int, folder: Path, out: Path) -> dict[str, Any]:
    config = DistributedConfig(fsdp_size=world, ep_size=world)
    model = adapted(load(folder, distributed_config=config))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    for step in range(3):
        ids = torch.randint(5, 200, (2, 8), generator=torch.Generator().manual_seed(step + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    started = time.monotonic()
    model.save_pretrained(out)
    factors = {n: whole(p).detach() for n, p in model.named_parameters() if ".lora_" in n}
    return {"factors": factors, "seconds": time.monotonic() - started}


def test_an_adapter_is_saved_by_all_ranks_together(folder: Path, tmp_path: Path) -> None:
    """PEFT gathers such a model's tensors itself: by the rank alone that writes, for ever."""
    results = run_distributed(run_saving, 2, folder, tmp_path / "adapter")
    written = Checkpoint([tmp_path / "adapter" / "adapter_model.safetensors"])
    factors = results[0]["factors"]
    assert len(list(written)) == len(factors)
    for name, value in factors.items():
        assert torch.equal(written.read(name.replace(".default", "")), value), name
    again = moe_qlora.load_adapter(load(folder), tmp_path / "adapter")
    loaded = {n: p.detach() for n, p in again.named_parameters() if ".lora_" in n}
    assert all(torch.equal(loaded[name], value) for name, value in factors.items())
    assert max(result["seconds"] for result in results) < 60


def run_empty(rank: int, world: int, folder: Path) -> dict[str, Any]:
    said = {}
    for how in ("train", "eval"):
        for shape in ((0, 8), (2, 0)):
            mesh = init_device_mesh("cpu", (world,))
            model = adapted(moe_qlora.expert_parallel(load(folder), mesh))
            model.train(how == "train")
            ids = torch.randint(5, 200, shape if rank else (2, 8))
            started = time.monotonic()
            try:
                model(input_ids=ids)
                said[how, shape] = ""
            except MoeQloraError as error:
                said[how, shape] = str(error)
            assert time.monotonic() - started < 30
    return said


def test_an_empty_batch_of_one_rank_is_one_sentence_on_all(folder: Path) -> None:
    results = run_distributed(run_empty, 2, folder)
    for said in results:
        for case, sentence in said.items():
            assert "rank 1 has an empty batch" in sentence, case
