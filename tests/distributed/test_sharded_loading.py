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
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.reader import Checkpoint
from moe_qlora.distributed import sharding
from moe_qlora.errors import ConfigError, NonFiniteWeightError, QuantizationError
from moe_qlora.packing import parametrize
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.training import train, whole

# No power of two: shares end within experts, within blocks of Linear layers, and within the absmax.
SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 250,
}
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "one level": {**NF4, "bnb_4bit_use_double_quant": False},
    "float storage": {**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}
LORA = LoraConfig(
    r=4,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
# case -> (folder, settings or None for a packed folder, mesh)
CASES: dict[str, tuple[str, str | None, str]] = {
    "int8 on 2": ("plain", "int8", "copies"),
    "packed int8 on 3": ("int8", None, "three"),
    "packed float storage on 2": ("float storage", None, "copies"),
    "nf4 on 3": ("plain", "nf4", "three"),
    "one level on 4": ("plain", "one level", "all"),
    "fused on disk on 4": ("fused", "nf4", "all"),
}
# The same by transformers' own loader: case -> (folder, settings or None for a packed folder)
CONFIGURED: dict[str, tuple[str, str | None]] = {
    "nf4": ("plain", "nf4"),
    "fused on disk": ("fused", "nf4"),
    "packed nf4": ("nf4", None),
}
STEPS = 3
_MMAP_THRESHOLD = -3  # of malloc.h
# What memory is measured with: 100 MB of packed experts, in bytes of which much else is small.
LARGE = {
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 16,
    "vocab_size": 256,
}


def settings(kind: str) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**KINDS[kind])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    tiny_model("qwen3_moe", **SIZES).to(torch.bfloat16).save_pretrained(root / "plain")
    fused = {**SIZES, "num_local_experts": 6, "intermediate_size": 48}
    tiny_model("gpt_oss", **fused).to(torch.bfloat16).save_pretrained(root / "fused")
    for kind in KINDS:
        load_whole(root / "plain", kind).save_pretrained(root / kind)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts are all the same one."""
    folder = tmp_path_factory.mktemp("large")
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
    return folder


def load_whole(folder: Path, kind: str | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = {} if kind is None else {"quantization_config": settings(kind)}
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config)


def adapted(model: Any) -> Any:
    torch.manual_seed(7)
    return moe_qlora.get_peft_model(model, copy.deepcopy(LORA))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, gathered."""
    return {
        name: whole(tensor).detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def decoded_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    packed = parametrize.iter_packed(model)
    return {f"{n}.{leaf}": parametrize.read_packed(m, leaf).dtype for n, m, leaf in packed}


def run_recast(folder: Path, mesh: Any) -> list[Any]:
    """Load a packed folder in another dtype than its own, by both loaders."""
    models = [moe_qlora.load_sharded(folder, mesh=mesh, dtype=torch.float32)]
    config = DistributedConfig(fsdp_size=mesh.size())
    with moe_qlora.enabled():
        models.append(
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, distributed_config=config
            )
        )
    return [(tensors_of(model), decoded_dtypes(model)) for model in models]


def local_bytes(model: nn.Module) -> int:
    return sum(
        (parameter._local_tensor if hasattr(parameter, "placements") else parameter).nbytes
        for parameter in model.parameters()
    )


def batches() -> list[torch.Tensor]:
    generators = (torch.Generator().manual_seed(step) for step in range(STEPS))
    return [torch.randint(5, 240, (4, 8), generator=generator) for generator in generators]


class CountedReads:
    """Counts the bytes that a rank reads of expert weights."""

    def __init__(self) -> None:
        self.total, self.stock = 0, (Checkpoint.read, Checkpoint.read_bytes)

    def __enter__(self) -> CountedReads:
        def counting(stock: Any) -> Any:
            def read(files: Checkpoint, key: str, *args: Any) -> torch.Tensor:
                tensor: torch.Tensor = stock(files, key, *args)
                self.total += tensor.nbytes if ".experts." in key else 0
                return tensor

            return read

        Checkpoint.read, Checkpoint.read_bytes = map(counting, self.stock)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        Checkpoint.read, Checkpoint.read_bytes = self.stock  # type: ignore[method-assign]


class Peak:
    """Watches this process's anonymous memory: `rise` has the bytes of its highest rise."""

    def __enter__(self) -> Peak:
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(
            _MMAP_THRESHOLD, 1 << 16
        )  # what is freed goes back at once, and is not counted
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


def run_memory(folders: dict[str, Path], large: Path, mesh: Any) -> dict[str, int]:
    arguments = {"quantization_config": settings("nf4"), "mesh": mesh, "dtype": torch.bfloat16}
    moe_qlora.load_sharded(folders["plain"], **arguments)  # imports what is imported late
    with Peak() as peak:
        model = moe_qlora.load_sharded(large, **arguments)
    return {"rise": peak.rise, "share": local_bytes(model)}


def run_configured(
    rank: int, world: int, folder: Path, kind: str | None, results: dict[str, Any]
) -> dict[str, Any]:
    config = {} if kind is None else {"quantization_config": settings(kind)}
    with moe_qlora.enabled(), CountedReads() as reads:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            distributed_config=DistributedConfig(fsdp_size=world),
            **config,
        )
    tensors = tensors_of(model)
    case = {
        "tensors": {} if rank else tensors,
        "is_sharded": isinstance(model, FSDPModule),
        "bytes": local_bytes(model),
        "read": reads.total,
    }
    if kind == "nf4" and folder.name == "plain":
        copies = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        with pytest.raises(ConfigError) as caught:
            moe_qlora.get_peft_model(model, copies)
        results["copies"] = str(caught.value)
        torch.manual_seed(7 + rank)
        peft_model = moe_qlora.get_peft_model(model, copy.deepcopy(LORA))
        case["losses"] = train(peft_model, batches(), rank, world)
        case["adapters"] = [p.detach() for p in peft_model.parameters() if p.requires_grad]
    return case


def run_cases(rank: int, world: int, folders: dict[str, Path], large: Path) -> dict[str, Any]:
    meshes = {
        "all": init_device_mesh("cpu", (world,)),
        "copies": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")),
        "three": DeviceMesh("cpu", [0, 1, 2]),
    }
    results: dict[str, Any] = {"memory": run_memory(folders, large, meshes["all"])}
    for case, (folder, kind, mesh) in CASES.items():
        if mesh == "three" and rank == 3:
            continue
        torch.manual_seed(7 + rank)  # ranks must not depend on their own generators
        config = None if kind is None else settings(kind)
        lora = copy.deepcopy(LORA)
        with CountedReads() as reads:
            model = moe_qlora.load_sharded(
                folders[folder], config, meshes[mesh], lora_config=lora, dtype=torch.bfloat16
            )
        tensors = tensors_of(model)
        results[case] = {
            "tensors": {} if rank else tensors,
            "is_sharded": isinstance(model, FSDPModule),
            "bytes": local_bytes(model),
            "read": reads.total,
        }
        if case == "one level on 4":
            results["losses"] = train(model, batches(), rank, world)
    for case, (folder, kind) in CONFIGURED.items():
        loaded = run_configured(rank, world, folders[folder], kind, results)
        results[f"{case} by transformers"] = loaded
    results["recast"] = run_recast(folders["nf4"], meshes["all"])
    results |= {"refusals": run_refusals(folders, meshes["all"], rank)}
    return results


def run_refusals(folders: dict[str, Path], mesh: Any, rank: int) -> dict[str, str]:
    refusals = {}
    pissa = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")
    for case, arguments in {
        "no settings": {},
        "pissa": {"quantization_config": settings("nf4"), "lora_config": pissa},
        "no layer": {"quantization_config": settings("nf4"), "wrap": ["Nothing"]},
    }.items():
        with pytest.raises(ConfigError) as caught:
            moe_qlora.load_sharded(folders["plain"], mesh=mesh, **arguments)
        refusals[case] = str(caught.value)

    stock = Checkpoint.read

    def read(files: Checkpoint, key: str, *args: Any) -> torch.Tensor:
        tensor = stock(files, key, *args)
        return tensor * torch.nan if rank == 1 and "experts" in key else tensor

    kind = NonFiniteWeightError if rank == 1 else QuantizationError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read", read)
        with pytest.raises(kind) as failed:
            moe_qlora.load_sharded(folders["plain"], settings("nf4"), mesh)
    refusals["not finite"] = str(failed.value)
    return refusals


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], large: Path) -> Any:
    return run_distributed(run_cases, 4, folders, large)


@pytest.mark.parametrize("case", CASES)
def test_the_shares_are_those_of_the_whole_model(
    ranks: Any, folders: dict[str, Path], case: str
) -> None:
    folder, kind, _ = CASES[case]
    model = load_whole(folders[folder], kind)
    moe_qlora.prepare_sharding(model)
    expected = tensors_of(adapted(model))
    got = ranks[0][case]["tensors"]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
    assert ranks[0][case]["is_sharded"]


def test_a_packed_folder_is_loaded_in_another_dtype(ranks: Any, folders: dict[str, Path]) -> None:
    model = load_whole(folders["nf4"], None, torch.float32)
    dtypes = decoded_dtypes(model)
    assert set(dtypes.values()) == {torch.float32}
    moe_qlora.prepare_sharding(model)
    expected = tensors_of(model)
    for tensors, decoded in ranks[0]["recast"]:
        assert dtypes.items() <= decoded.items()
        assert set(decoded.values()) == {torch.float32}
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].dtype == tensor.dtype, name
            assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_share_alone(ranks: Any, case: str) -> None:
    mesh = CASES[case][2]
    shards = {"all": 4, "copies": 2, "three": 3}[mesh]
    held = [rank[case]["bytes"] for rank in ranks if case in rank]
    tensors = ranks[0][case]["tensors"]
    total = sum(held[:shards])
    stored = sum(t.nbytes for n, t in tensors.items() if "tables" not in n and "inv_freq" not in n)
    assert total == stored
    assert max(held) < 1.1 * total / shards


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_share_alone(ranks: Any, folders: dict[str, Path], case: str) -> None:
    folder, kind, mesh = CASES[case]
    files = Checkpoint(sorted(folders[folder].glob("*.safetensors")))
    experts = [key for key in files if ".experts." in key]
    stored = sum(files.info(key).nbytes for key in experts)
    shards = {"all": 4, "copies": 2, "three": 3}[mesh]
    weights = {key.rpartition(".experts.")[0] for key in experts}
    # Packed: tables and records of each weight. Else: the experts in which a share begins and ends.
    slack = 2 * len(weights) * (2048 if kind is None else 2 * 96 * 64 * 2)
    for rank in ranks:
        if case in rank:
            assert rank[case]["read"] <= stored / shards + slack


@pytest.mark.parametrize("case", CONFIGURED)
def test_transformers_own_loader_gives_the_same_shares(
    ranks: Any, folders: dict[str, Path], case: str
) -> None:
    folder, kind = CONFIGURED[case]
    model = load_whole(folders[folder], kind)
    moe_qlora.prepare_sharding(model)
    loaded = [rank[f"{case} by transformers"] for rank in ranks]
    assert all(one["is_sharded"] for one in loaded)
    expected, got = tensors_of(model), loaded[0]["tensors"]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    stored = sum(t.nbytes for n, t in got.items() if "tables" not in n and "inv_freq" not in n)
    assert max(one["bytes"] for one in loaded) < 1.1 * stored / 4
    files = Checkpoint(sorted(folders[folder].glob("*.safetensors")))
    experts = [files.info(key).nbytes for key in files if ".experts." in key]
    assert max(one["read"] for one in loaded) < 0.6 * sum(experts)


def test_training_is_that_of_one_process(ranks: Any, folders: dict[str, Path]) -> None:
    for kind, losses in (
        ("one level", [rank["losses"] for rank in ranks]),
        ("nf4", [rank["nf4 by transformers"]["losses"] for rank in ranks]),
    ):
        expected = train(adapted(load_whole(folders["plain"], kind)), batches())
        assert losses == [pytest.approx(expected, abs=2e-2)] * 4  # bfloat16


def test_adapters_on_a_sharded_model_stay_equal(ranks: Any) -> None:
    first, *others = (rank["nf4 by transformers"]["adapters"] for rank in ranks)
    assert len(first) == 2 * 2 * 2 + 2 * 2 * 2
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert "FSDP2 has sharded them already" in ranks[0]["copies"]


def test_memory_holds_a_share_and_little_else(ranks: Any) -> None:
    total = sum(rank["memory"]["share"] for rank in ranks)
    assert total > 100e6
    for rank in ranks:
        assert rank["memory"]["rise"] < rank["memory"]["share"] + 0.1 * total


def test_what_cannot_be_followed_is_said(ranks: Any) -> None:
    for rank in ranks:
        said = rank["refusals"]
        assert "give a quantization_config" in said["no settings"]
        assert "init_lora_weights='pissa'" in said["pissa"]
        assert "decoder" in said["no layer"]
    assert "holds NaN or inf" in ranks[1]["refusals"]["not finite"]
    assert "Another rank could not pack" in ranks[0]["refusals"]["not finite"]


def test_integers_get_no_gradients_asked_on_an_older_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

    module: Any = fsdp_param
    with moe_qlora.shards_integers():
        assert module.nn is nn  # this torch is right
    monkeypatch.setattr(sharding, "_takes_integers", lambda: False)
    with pytest.raises(RuntimeError, match="gradients"):
        nn.Parameter(torch.zeros(2, dtype=torch.uint8))
    with moe_qlora.shards_integers():
        integer = module.nn.Parameter(torch.zeros(2, dtype=torch.uint8))
        floating = module.nn.Parameter(torch.zeros(2))
        assert (integer.requires_grad, floating.requires_grad) == (False, True)
        assert not module.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
        assert type(integer) is nn.Parameter
        assert isinstance(nn.Parameter(torch.zeros(2)), module.nn.Parameter)
        assert module.nn.Module is nn.Module
    assert module.nn is nn
