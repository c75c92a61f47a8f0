"""Ranks that were given different things are told apart before anything is read or computed."""

import shutil

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.ranks import said

NF4 = training.NF4 | {"bnb_4bit_compute_dtype": "float32"}
FP4 = NF4 | {"bnb_4bit_quant_type": "fp4"}
IDS = torch.arange(16).view(2, 8)


def lora(**changes):
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes})


def sharded(folder, settings, config=None):
    moe_qlora.load_sharded(folder, settings, lora_config=config)


def fsdp(folder, settings):
    training.loaded(folder, settings, distributed_config=DistributedConfig(fsdp_size=2))


def ddp(folder, settings, group=None):
    model = moe_qlora.get_peft_model(training.loaded(folder, settings), lora(), experts=True)
    model = DistributedDataParallel(model, process_group=group)
    model(input_ids=IDS, labels=IDS).loss.backward()


def own_groups(folder, settings):
    """Steps under DDP of groups of one rank each."""
    groups = [distributed.new_group([rank]) for rank in range(2)]
    ddp(folder, settings, groups[distributed.get_rank()])


CASES = [  # call, what rank 0 and rank 1 are given, what is said
    (sharded, ("one", NF4), ("other", NF4), "model.safetensors of the"),
    (sharded, ("one", NF4, lora()), ("one", NF4, lora(lora_alpha=8)),
     "lora_config.lora_alpha 8, and rank 0 has 4"),
    (fsdp, ("one", NF4), ("one", FP4), "fp4"),
    (ddp, ("one", NF4), ("copy", NF4), ""),
    (ddp, ("one", NF4), ("one", FP4), "codec of"),
    (own_groups, ("one", NF4), ("one", FP4), ""),
]  # fmt: skip


def run(rank, world, root):
    given = [(call, *ranks[rank]) for call, *ranks, _ in CASES]
    return [said(call, root / folder, *rest) for call, folder, *rest in given]


def test_what_differs_is_named_by_all_ranks(tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "vocab_size": 256}
    tiny_model("qwen3_moe", **sizes).save_pretrained(tmp_path / "one")
    for name in ("copy", "other"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][5, 7] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    for texts in run_distributed(run, 2, tmp_path):
        for (*_, words), text in zip(CASES, texts, strict=True):
            assert words in text and ("rank 1" in text) == bool(words), text
            assert bool(text) == bool(words), text
