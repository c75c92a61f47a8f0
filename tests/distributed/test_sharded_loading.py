"""Loading a share at a time: what the ranks hold together is what one process loads, bit for bit.

Four processes serve every case: as four shards, as two copies of two, and as three of them.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.prequantized import write_both
from tests.helpers.ranks import CountedReads, are_same, said, tensors_of
from tests.helpers.training import NF4, loaded, train

# No power of two: shares end within experts, within blocks of Linear layers, and within the absmax.
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "vocab_size": 258,
}  # fmt: skip
FP32 = {**NF4, "bnb_4bit_compute_dtype": torch.float32}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": FP32,
    "float storage": {
        **FP32, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32
    },
    "int8": {"load_in_8bit": True},
    # parameters that are dequantized, and sharded as they are
    "skips": {**FP32, "llm_int8_skip_modules": ["self_attn", "layers.1.mlp", "lm_head"]},
}  # fmt: skip
# Folders that their makers quantized
FP8, MXFP4, NVFP4 = "deepseek_v3 fp8", "gpt_oss mxfp4", "qwen3_moe modelopt nvfp4"
LORA = LoraConfig(
    r=4,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
# case -> (folder, settings or None for a packed folder, mesh; None: by transformers' own loader)
CASES: dict[str, tuple[str, str | None, str | None]] = {
    "int8 on 2": ("plain", "int8", "copies"),
    "packed float storage on 3": ("float storage", None, "three"),
    "fused on disk on 4": ("fused", "nf4", "all"),
    "nf4 by transformers": ("plain", "nf4", None),
    "packed int8 by transformers": ("int8", None, None),
    "nvfp4 on 4": (NVFP4, "int8", "all"),
    "fp8 by transformers": (FP8, "skips", None),
}
SHARDS = {"all": 4, "copies": 2, "three": 3, None: 4}
_MMAP_THRESHOLD = -3  # of malloc.h
# What memory is measured with: 100 MB of packed experts, in bytes of which much else is small.
LARGE = {
    "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 16, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    model: Any = tiny_model("qwen3_moe", **SIZES)
    model.to(torch.bfloat16).save_pretrained(root / "plain")
    fused = {**SIZES, "num_local_experts": 6, "intermediate_size": 48}
    tiny_model("gpt_oss", **fused).to(torch.bfloat16).save_pretrained(root / "fused")
    for kind in ("nf4", "float storage", "int8"):
        load_whole(root / "plain", kind).save_pretrained(root / kind)
    _write_large(root / "large")
    makers = {case: write_both(root / case, case) / "maker" for case in (FP8, MXFP4, NVFP4)}
    return {folder.name: folder for folder in root.iterdir()} | makers


def _write_large(folder: Path) -> None:
    """A checkpoint whose experts are all the same one."""
    folder.mkdir()
    model = tiny_model("qwen3_moe", device="meta", dtype=torch.bfloat16, **LARGE)
    torch.manual_seed(0)
    gate, down = (torch.randn(shape).to(torch.bfloat16) for shape in ((512, 256), (256, 512)))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            tensors[name] = torch.randn(tensor.shape).to(torch.bfloat16) * 0.02
            continue
        prefix = name.rpartition(".")[0]
        for expert in range(LARGE["num_experts"]):
            for part, weight in (("gate", gate), ("up", gate), ("down", down)):
                tensors[f"{prefix}.{expert}.{part}_proj.weight"] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    model.config.save_pretrained(folder)


def load_whole(
    folder: Path, kind: str | None, dtype: torch.dtype = torch.bfloat16, ranks: int = 1
) -> Any:
    """Load by transformers; where there are several ranks, a share on each."""
    more = {"distributed_config": DistributedConfig(fsdp_size=ranks)} if ranks > 1 else {}
    return loaded(folder, None if kind is None else KINDS[kind], dtype=dtype, **more)


def adapted(model: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return moe_qlora.get_peft_model(model, copy.deepcopy(LORA))


def local_bytes(model: nn.Module) -> dict[bool, int]:
    """Bytes that this rank holds: of weights, and of trained parameters."""
    sizes = {False: 0, True: 0}
    for parameter in model.parameters():
        local = parameter._local_tensor if hasattr(parameter, "placements") else parameter
        sizes[parameter.requires_grad] += local.nbytes
    return sizes


def batches() -> list[torch.Tensor]:
    generators = (torch.Generator().manual_seed(step) for step in range(3))
    return [torch.randint(5, 240, (4, 8), generator=generator) for generator in generators]


class Peak:
    """Watches this process's anonymous memory: `rise` has the bytes of its highest rise."""

    def __enter__(self) -> Peak:
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once, uncounted
        libc.malloc_trim(0)
        self.start = self.highest = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def rise(self) -> int:
        return self.highest - self.start

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, self._now())

    @staticmethod
    def _now() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def run_cases(rank: int, world: int, folders: dict[str, Path]) -> dict[str, Any]:
    everyone = init_device_mesh("cpu", (world,))
    meshes = {
        "all": everyone,
        "copies": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")),
        "three": DeviceMesh("cpu", [0, 1, 2]),
    }
    plain, bf16 = folders["plain"], torch.bfloat16
    moe_qlora.load_sharded(plain, KINDS["nf4"])  # imports what is imported late
    with Peak() as peak:
        model = moe_qlora.load_sharded(folders["large"], KINDS["nf4"], dtype=bf16)
    results: dict[str, Any] = {"rise": peak.rise, "share": sum(local_bytes(model).values())}
    for case, (folder, kind, mesh) in CASES.items():
        if mesh == "three" and rank == 3:
            continue
        torch.manual_seed(7 + rank)  # ranks must not depend on their own generators
        config = None if kind is None else KINDS[kind]
        with CountedReads() as reads:
            if mesh is None:
                model = load_whole(folders[folder], kind, ranks=world)
            else:
                model = moe_qlora.load_sharded(
                    folders[folder], config, meshes[mesh],
                    lora_config=copy.deepcopy(LORA), dtype=bf16,
                )  # fmt: skip
        tensors = tensors_of(model)
        results[case] = {
            "tensors": {} if rank else tensors,
            "is_sharded": isinstance(model, FSDPModule),
            "bytes": local_bytes(model),
            "read": reads.total,
        }
        if case == "nf4 by transformers":
            copies = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
            results["copies"] = said(moe_qlora.get_peft_model, model, copies)
            model = adapted(model, 7 + rank)
            results["losses"] = train(model, batches(), rank, world)
            results["adapters"] = [p.detach() for p in model.parameters() if p.requires_grad]
    with moe_qlora.enabled(keep_codes=True):
        config = DistributedConfig(fsdp_size=world)
        kept = said(loaded, folders[MXFP4], KINDS["nf4"], distributed_config=config)
    return results | {"kept": kept} | run_refusals(plain, rank)


def run_refusals(folder: Path, rank: int) -> dict[str, str]:
    pissa = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")
    nf4, stock = KINDS["nf4"], Checkpoint.read

    def read(files: Checkpoint, key: str, *args: Any) -> torch.Tensor:
        tensor = stock(files, key, *args)
        return tensor * torch.nan if rank == 1 and "experts" in key else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read", read)
        not_finite = said(moe_qlora.load_sharded, folder, nf4)
    return {
        "no settings": said(moe_qlora.load_sharded, folder),
        "pissa": said(moe_qlora.load_sharded, folder, nf4, lora_config=pissa),
        "no layer": said(moe_qlora.load_sharded, folder, nf4, wrap=["Nothing"]),
        "not finite": not_finite,
    }


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> Any:
    return run_distributed(run_cases, 4, folders)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert are_same({name: got[name] for name in expected}, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_and_reads_its_share_of_the_whole_model_alone(ranks, folders, case):
    folder, kind, mesh = CASES[case]
    model = load_whole(folders[folder], kind)
    moe_qlora.prepare_sharding(model)
    shards, loads = SHARDS[mesh], [rank[case] for rank in ranks if case in rank]
    tensors = loads[0]["tensors"]
    assert_equal(tensors, tensors_of(model if mesh is None else adapted(model)))
    assert all(one["is_sharded"] for one in loads)
    held = [sum(one["bytes"].values()) for one in loads]
    buffers = ("tables", "inv_freq", "e_score_correction_bias")
    stored = sum(t.nbytes for n, t in tensors.items() if not n.endswith(buffers))
    assert sum(held[:shards]) == stored
    assert max(held) < 1.1 * stored / shards
    files = Checkpoint(sorted(folders[folder].glob("*.safetensors")))
    experts = [key for key in files if ".experts." in key and "layers.2." not in key]
    stored = sum(files.info(key).nbytes for key in experts)
    weights = {key.rpartition(".experts.")[0] for key in experts}
    # Packed: tables and records of each weight. Else: the experts in which a share begins and ends.
    slack = 2 * len(weights) * (2048 if kind is None else 2 * 96 * 64 * 2)
    if folder in (FP8, NVFP4):  # scales of whole rows
        slack = stored * 0.15
    assert all(one["read"] <= stored / shards + slack for one in loads)


def test_adapters_on_a_sharded_model_train_alike(ranks: Any, folders: dict[str, Path]) -> None:
    expected = train(adapted(load_whole(folders["plain"], "nf4")), batches())
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, abs=2e-2)  # bfloat16
    first, *others = (rank["adapters"] for rank in ranks)
    assert len(first) == 2 * 2 * 4 + 2 * 2 * 2
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert "FSDP2 has sharded them already" in ranks[0]["copies"]


def test_memory_holds_a_share_and_little_else(ranks: Any) -> None:
    total = sum(rank["share"] for rank in ranks)
    assert total > 100e6
    for rank in ranks:
        assert rank["rise"] < rank["share"] + 0.1 * total


def test_what_cannot_be_followed_is_said(ranks: Any) -> None:
    for rank, one in enumerate(ranks):
        assert "keeps the MXFP4 codes of its checkpoint, which are not sharded" in one["kept"]
        assert one["no settings"].startswith("ConfigError") and "give a quant" in one["no settings"]
        assert one["pissa"].startswith("ConfigError: init_lora_weights='pissa'")
        assert one["no layer"].startswith("ConfigError") and "decoder" in one["no layer"]
        kind, words = ("QuantizationError", "Another rank could not pack")
        if rank == 1:
            kind, words = ("NonFiniteWeightError", "holds NaN or inf")
        assert one["not finite"].startswith(kind) and words in one["not finite"]
