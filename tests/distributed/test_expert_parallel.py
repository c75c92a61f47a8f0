"""Experts divided over ranks train, save and load as one process with all of them does.

Every group of processes runs many cases: starting them takes longer than a case.
"""

from __future__ import annotations

import copy
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint.reader import Checkpoint
from moe_qlora.errors import MoeQloraError
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import unpack
from moe_qlora.packing.codecs import codec_of
from moe_qlora.testing import run_distributed, tiny_inputs, tiny_model
from tests.helpers import training
from tests.helpers.training import adamw, whole, whole_gradients

STEPS = 4
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
# Experts of 64 x 64: whole first-level blocks, and 64 of them an expert, so that four experts are
# a whole second-level block.
SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "vocab_size": 256,
}


def packed_model(settings: dict[str, Any] = NF4, **sizes: int) -> Any:
    model = tiny_model("qwen3_moe", **{**SIZES, **sizes})
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**settings))
    return model


def adapted(model: Any, rank: int = 4) -> Any:
    torch.manual_seed(1)
    modules = [
        name
        for name in ("q_proj", "v_proj")
        if any(module.endswith(name) for module, _ in model.named_modules())
    ]
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=modules)
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    set_lora_b(peft_model)
    return peft_model


def set_lora_b(peft_model: nn.Module) -> None:
    """Give `lora_B`, which is zero at first, values that do not depend on the number of ranks."""
    from torch.distributed.tensor import DTensor

    for name, parameter in peft_model.named_parameters():
        if "lora_B" not in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(parameter.shape, generator=generator) * 0.05
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                wrapper = peft_model.get_submodule(name.partition(".lora_B")[0])
                share, ranks = wrapper._share, parameter.shape[1] // wrapper.num_experts
                part = whole.view(len(whole), ranks, -1)[:, :, share.first : share.last]
                parameter.to_local().copy_(part.flatten(1))
            else:
                parameter.copy_(whole)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 248, (12, 8), generator=generator) for _ in range(STEPS)]


def train(
    model: Any, data: list[torch.Tensor], rank: int = 0, world: int = 1, max_norm: float = 0.0
) -> dict[str, Any]:
    """Losses of all steps, the first step's whole gradients, and norms where they are clipped."""
    from accelerate import Accelerator

    gradients: dict[str, torch.Tensor] = {}
    norms = []

    def clip(step: int) -> None:
        if step == 0:
            gradients.update(whole_gradients(model))
        if max_norm:
            norms.append(float(Accelerator(cpu=True).clip_grad_norm_(model.parameters(), max_norm)))

    losses = training.train(model, data, rank, world, after_backward=clip)
    return {"losses": losses, "gradients": gradients, "norms": norms}


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    ignored = moe_qlora.expert_parallel_parameters(model)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


def checkpointed(model: Any, reentrant: bool | None) -> Any:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


CASES: dict[str, dict[str, Any]] = {
    "ddp, clipped": {"max_norm": 0.05},
    "ddp, int8, checkpointed": {"settings": INT8, "reentrant": False},
    "fsdp2, clipped, checkpointed": {"how": "fsdp2", "max_norm": 0.05, "reentrant": False},
}


def run_case(rank: int, world: int, mesh: Any, name: str, **sizes: int) -> dict[str, Any]:
    case = {"how": "ddp", "reentrant": None, "settings": NF4, "max_norm": 0.0, **CASES[name]}
    model = moe_qlora.expert_parallel(packed_model(case["settings"], **sizes), mesh)
    model = wrapped(checkpointed(adapted(model), case["reentrant"]), case["how"])
    return train(model, batches(), rank, world, case["max_norm"])


def run_two(rank: int, world: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """Everything that two ranks are asked to show."""
    mesh = init_device_mesh("cpu", (world,))
    return {
        "training": {name: run_case(rank, world, mesh, name) for name in CASES},
        "loading": run_loading(rank, mesh, folders),
        "refusals": run_refusals(mesh, folders["single experts"]),
        "optimizers": run_optimizers(rank, world),
        "trainer": run_trainer(mesh, out),
        "trainer, resumed": run_trainer(mesh, out, resume_from=out / "checkpoint-2"),
        "resumed": {how: run_resumed(rank, world, mesh, how, out) for how in ("ddp", "fsdp2")},
        "saved": run_saving(mesh, folders, out),
        "families": {name: run_family(rank, world, mesh, name) for name in FAMILIES},
        "different lengths": train_different_lengths(rank, mesh),
        "detected": detect_on_one_rank(rank, mesh),
    }


def run_four(rank: int, world: int) -> dict[str, Any]:
    """Two copies of each expert, on two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    return run_case(rank, world, mesh, "ddp, clipped", num_hidden_layers=1)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], out: Path) -> Any:
    return run_distributed(run_two, 2, folders, out)


@cache
def reference(kind: str, max_norm: float, layers: int) -> dict[str, Any]:
    """What one process with all experts computes."""
    model = packed_model(INT8 if kind == "int8" else NF4, num_hidden_layers=layers)
    return train(adapted(model), batches(), max_norm=max_norm)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(two: Any, case: str) -> None:
    for result in two:
        assert_same(result["training"][case], case)


def test_four_ranks_with_two_copies_of_each_expert_train_as_one() -> None:
    for divided in run_distributed(run_four, 4):
        assert_same(divided, "ddp, clipped", layers=1)


def assert_same(divided: dict[str, Any], case: str, layers: int = 2) -> None:
    kind = "int8" if "int8" in case else "nf4"
    whole = reference(kind, CASES[case].get("max_norm", 0.0), layers)
    assert divided["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert divided["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    assert divided["gradients"].keys() == whole["gradients"].keys()
    for name, gradient in whole["gradients"].items():
        error = (divided["gradients"][name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error < 1e-4, name


# Expert classes of several kinds: with biases, with shared experts, without a gate.

FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "nemotron_h")


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of LoRA on all experts, of an int8 model: its tiny experts fill no blocks of 64."""
    peft_model = adapted(model, rank=2)
    loss = peft_model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    trained = {n: p for n, p in peft_model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **{name: whole(p.grad) for name, p in trained.items()}}


def int8_model(model_type: str) -> Any:
    model = tiny_model(model_type)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**INT8))
    return model


def run_family(rank: int, world: int, mesh: Any, model_type: str) -> float:
    """The largest difference between two ranks and one process, relative to what differs."""
    alone, divided = int8_model(model_type), int8_model(model_type)
    inputs = tiny_inputs(alone, batch=2 * world)
    own = {name: value.chunk(world)[rank] for name, value in inputs.items()}
    right = loss_and_gradients(alone, inputs)
    seen = loss_and_gradients(moe_qlora.expert_parallel(divided, mesh), own)
    differences = []
    for name, value in right.items():
        ours = seen[name]
        if "experts" not in name:  # each rank's own, of its batch
            ours = ours.clone()
            distributed.all_reduce(ours)
            ours /= world
        differences.append(float((ours - value).norm() / value.norm().clamp_min(1e-6)))
    return max(differences)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_experts_of_many_kinds_compute_as_in_one_process(two: Any, model_type: str) -> None:
    assert all(result["families"][model_type] < 1e-4 for result in two)


# What is refused, and what is noticed.


def run_refusals(mesh: Any, folder: Path) -> dict[str, str]:
    divided = moe_qlora.expert_parallel(packed_model(), mesh)
    peft_model = adapted(divided)
    ids = batches()[0][:2]

    def sharded() -> None:
        model: Any = moe_qlora.expert_parallel(packed_model(), mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        model(input_ids=ids)

    def by_config(**sizes: int) -> Any:
        config = DistributedConfig(**sizes)
        return load(folder, NF4, distributed_config=config)

    def of_a_copy() -> None:
        original: Any = moe_qlora.expert_parallel(packed_model(), mesh)
        twin = copy.deepcopy(original)
        before = original(input_ids=ids).logits
        for module in original.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dtype == torch.uint8:
                    parameter.zero_()
        assert not torch.allclose(original(input_ids=ids).logits, before)
        torch.testing.assert_close(twin(input_ids=ids).logits, before)
        raise MoeQloraError("a copy has weights of its own")

    calls: dict[str, Any] = {
        "deepcopy": of_a_copy,
        "tp_size": lambda: by_config(tp_size=2, ep_size=2),
        "twice": lambda: moe_qlora.expert_parallel(divided, mesh),
        "merge": lambda: peft_model.merge_and_unload(),
        "sharded": sharded,
        "trainer": lambda: Trainer(peft_model, TrainingArguments(use_cpu=True, report_to=[])),
    }
    seen = {}
    for name, call in calls.items():
        try:
            call()
        except (MoeQloraError, ValueError) as error:
            seen[name] = str(error)
    return seen


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("deepcopy", "a copy has weights of its own"),
        ("tp_size", "distributed_config has tp_size=2, which packed weights do not support"),
        ("twice", "call expert_parallel once, before"),
        ("merge", "Merging needs all experts"),
        ("sharded", "pass ignored_params=moe_qlora.expert_parallel_parameters"),
        ("trainer", "Pass `save_only_model=True`"),  # transformers' own words
    ],
)
def test_what_would_go_wrong_is_refused(two: Any, call: str, sentence: str) -> None:
    for result in two:
        assert sentence in result["refusals"].get(call, "nothing was raised")


# Trainer.


def run_trainer(mesh: Any, out: Path, resume_from: Path | None = None) -> dict[str, Any]:
    """Train with transformers' Trainer, which averages and saves what the model says it must."""
    rank, world = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    model = packed_model()
    if mesh is not None:
        model = moe_qlora.expert_parallel(model, mesh)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    settings = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=4 // world,
        max_steps=4,
        learning_rate=1e-2,
        max_grad_norm=0.05,
        gradient_accumulation_steps=2,
        report_to=[],
        save_steps=2,
        save_only_model=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.cat(batches())]
    trainer = Trainer(peft_model, settings, train_dataset=data)
    if resume_from is not None:
        trainer.train(resume_from_checkpoint=str(resume_from))
        return {"log": trainer.state.log_history}
    trainer.train()
    trainer.save_model(str(out / "trainer"))
    trained = {n: whole(p).detach() for n, p in peft_model.named_parameters() if p.requires_grad}
    return {"weights": trained, "log": trainer.state.log_history}


def test_trainer_trains_as_in_one_process(two: Any, tmp_path: Path) -> None:
    alone = run_trainer(None, tmp_path)
    for result in two:
        seen = result["trainer"]
        for ours, right in zip(seen["log"][:-1], alone["log"][:-1], strict=True):
            assert ours["loss"] == pytest.approx(right["loss"], abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        assert seen["weights"].keys() == alone["weights"].keys()
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(seen["weights"][name], weight, rtol=1e-3, atol=1e-5)


def test_trainer_goes_on_from_an_adapter(two: Any) -> None:
    for result in two:
        seen, expected = (
            [entry["loss"] for entry in result[name]["log"] if "loss" in entry]
            for name in ("trainer, resumed", "trainer")
        )
        assert len(seen) == 4
        # Later ones differ: the optimizer and its learning rate start anew.
        assert seen[:3] == pytest.approx(expected[:3], abs=1e-5)


def run_resumed(rank: int, world: int, mesh: Any, how: str, out: Path) -> list[float]:
    """Losses of two steps, and of two more by another model and optimizer, from files."""
    data, files = batches()[:4], out / f"resumed, {how}"
    peft_model = adapted(moe_qlora.expert_parallel(packed_model(), mesh))
    model = wrapped(peft_model, how)
    optimizer = adamw(model, foreach=True)
    losses = training.train(model, data[:2], rank, world, optimizer=optimizer)
    peft_model.save_pretrained(files)
    torch.save(optimizer.state_dict(), files / f"optimizer-{rank}.pt")
    divided = moe_qlora.expert_parallel(packed_model(), mesh)
    model = wrapped(moe_qlora.load_adapter(divided, files, is_trainable=True), how)
    optimizer = adamw(model, foreach=True)
    optimizer.load_state_dict(torch.load(files / f"optimizer-{rank}.pt", weights_only=False))
    return losses + training.train(model, data[2:], rank, world, optimizer=optimizer)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training_goes_on_with_each_rank_s_optimizer(two: Any, how: str) -> None:
    expected = reference("nf4", 0.0, 2)["losses"][:4]
    for result in two:
        assert result["resumed"][how] == pytest.approx(expected, abs=1e-5)


# Loading.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with one tensor for each expert, with fused ones, and packed."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model_type, sizes in (
        ("single experts", "qwen3_moe", {}),
        ("fused", "gpt_oss", {"num_local_experts": 8, "intermediate_size": 64}),
    ):
        tiny_model(model_type, **{**SIZES, **sizes}).save_pretrained(root / name)
    tiny_model("qwen3_moe", **{**SIZES, "num_experts": 4}).save_pretrained(root / "half blocks")
    adapted(packed_model()).save_pretrained(root / "adapter")
    for kind, settings in KINDS.items():
        load(root / "single experts", settings).save_pretrained(root / f"packed {kind}")
    return {folder.name: folder for folder in root.iterdir()}


KINDS = {"nf4": NF4, "plain nf4": {**NF4, "bnb_4bit_use_double_quant": False}, "int8": INT8}
SOURCES = {
    "single experts": NF4,
    "fused": NF4,
    "int8 experts": INT8,
    "by DistributedConfig": NF4,
    "before packing": NF4,
    **{f"packed {kind}": None for kind in KINDS},
}


def load(
    folder: Path, settings: dict[str, Any] | None, mesh: Any = None, distributed_config: Any = None
) -> Any:
    config: dict[str, Any] = {}
    if settings is not None:
        config["quantization_config"] = BitsAndBytesConfig(**settings)
    if distributed_config is not None:
        config["distributed_config"] = distributed_config
    with moe_qlora.enabled(expert_mesh=mesh):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config)


def packed_weights(model: Any) -> dict[str, Any]:
    return {f"{m}.{n}": parametrize.read_packed(o, n) for m, o, n in parametrize.iter_packed(model)}


def tensors_of(packed: Any) -> list[torch.Tensor]:
    nested = [packed.nested.absmax, packed.nested.offset] if packed.nested else []
    return [packed.flat_codes, packed.absmax, *nested]


def run_loading(rank: int, mesh: Any, folders: dict[str, Path]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    read, counted = Checkpoint.read, [0]

    def counting(self: Any, key: str, *args: Any) -> torch.Tensor:
        tensor = read(self, key, *args)
        counted[0] += tensor.nbytes if ".experts." in key else 0
        return tensor

    for source, settings in SOURCES.items():
        folder = folders.get(source, folders["single experts"])
        reference = load(folder, settings)
        Checkpoint.read = counting
        counted[0] = 0
        if source == "by DistributedConfig":
            config = DistributedConfig(fsdp_size=mesh.size(), ep_size=mesh.size())
            divided = load(folder, settings, distributed_config=config)
            assert config == DistributedConfig(fsdp_size=mesh.size(), ep_size=mesh.size())
        elif source == "before packing":
            Checkpoint.read = read
            divided = moe_qlora.expert_parallel(tiny_model("qwen3_moe", **SIZES), mesh)
            moe_qlora.quantize_experts(divided, BitsAndBytesConfig(**NF4))
            reference = packed_model()  # whose Linear layers are not packed either
        else:
            divided = load(folder, settings, mesh)
        Checkpoint.read = read
        with torch.no_grad():
            ids = batches()[0][rank : rank + 2]
            difference = (
                (divided(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max()
            )
        results[source] = {
            "weights": {name: tensors_of(one) for name, one in packed_weights(divided).items()},
            "read": counted[0],
            "difference": float(difference),
        }
    half = load(folders["half blocks"], NF4, mesh)
    results["half blocks"] = {
        name: (one.flat_codes, unpack(one)) for name, one in packed_weights(half).items()
    }
    tuned = moe_qlora.load_adapter(
        moe_qlora.expert_parallel(packed_model(), mesh), str(folders["adapter"])
    )
    results["adapter"] = {n: whole(p).detach() for n, p in tuned.named_parameters() if "lora_" in n}
    return results


@pytest.fixture(scope="module")
def loaded(two: Any) -> Any:
    return [result["loading"] for result in two]


@pytest.mark.parametrize("source", SOURCES)
def test_each_rank_loads_its_experts_bit_for_bit(
    loaded: Any, folders: dict[str, Path], source: str
) -> None:
    folder = folders.get(source, folders["single experts"])
    for name, packed in packed_weights(load(folder, SOURCES[source])).items():
        for rank, one in enumerate(loaded):
            expected = tensors_of(codec_of(packed.kind).cut(packed, rank * 4, rank * 4 + 4))
            for ours, right in zip(one[source]["weights"][name], expected, strict=True):
                assert torch.equal(ours, right), name


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "before packing"])
def test_each_rank_reads_its_experts_alone(
    loaded: Any, folders: dict[str, Path], source: str
) -> None:
    folder = folders.get(source, folders["single experts"])
    checkpoint = Checkpoint(sorted(folder.glob("*.safetensors")))
    stored = [
        checkpoint.info(key) for key in checkpoint if ".experts." in key and "bias" not in key
    ]
    tables = sum(info.nbytes for info in stored if info.nbytes < 2048)
    share = sum(info.nbytes for info in stored if info.nbytes >= 2048) // 2
    for one in loaded:
        assert share <= one[source]["read"] <= share + tables


@pytest.mark.parametrize("source", SOURCES)
def test_a_divided_model_computes_what_the_whole_one_does(loaded: Any, source: str) -> None:
    assert all(one[source]["difference"] < 1e-5 for one in loaded)


# Saving.


def run_saving(mesh: Any, folders: dict[str, Path], out: Path) -> list[str]:
    for source in ("packed nf4", "packed int8", "half blocks"):
        settings = NF4 if source == "half blocks" else None
        load(folders[source], settings, mesh).save_pretrained(out / source)
    adapted(moe_qlora.expert_parallel(packed_model(), mesh)).save_pretrained(out / "adapter")
    return sorted(path.name for path in out.iterdir())


@pytest.mark.parametrize("kind", ["packed nf4", "packed int8"])
def test_all_ranks_save_one_packed_folder_as_one_process_does(
    two: Any, out: Path, folders: dict[str, Path], kind: str
) -> None:
    ours, right = (sorted(folder.glob("*")) for folder in (out / kind, folders[kind]))
    assert [file.name for file in ours] == [file.name for file in right]
    for one, other in zip(ours, right, strict=True):
        assert one.read_bytes() == other.read_bytes() or one.name == "config.json", one.name


def test_a_folder_of_second_level_blocks_that_were_cut_loads(
    two: Any, out: Path, folders: dict[str, Path]
) -> None:
    saved = packed_weights(load(out / "half blocks", None))
    for name, packed in packed_weights(load(folders["half blocks"], NF4)).items():
        assert torch.equal(saved[name].flat_codes, packed.flat_codes)
        torch.testing.assert_close(unpack(saved[name]), unpack(packed), rtol=0.02, atol=1e-3)


def test_all_ranks_save_one_adapter_as_one_process_does(
    two: Any, out: Path, folders: dict[str, Path]
) -> None:
    ours, right = out / "adapter", folders["adapter"]
    for name in ("adapter_model.safetensors", "moe_qlora_adapter.json"):
        assert (ours / name).read_bytes() == (right / name).read_bytes(), name
    configs = [LoraConfig.from_pretrained(folder) for folder in (ours, right)]
    assert configs[0] == configs[1]
    shapes = []
    for folder in (out / "trainer", folders["adapter"]):
        checkpoint = Checkpoint([folder / "adapter_model.safetensors"])
        shapes.append({key: checkpoint.info(key).shape for key in checkpoint})
    assert shapes[0] == shapes[1]


# torch's grouped optimizers and clipping are its defaults on GPUs.

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# torch's own loop over gradients does not clip plain tensors and DTensors together.
OPTIMIZER_CASES = [("ddp", "loop"), ("ddp", "foreach"), ("ddp", "fused")]
OPTIMIZER_CASES += [("fsdp2", "foreach"), ("fsdp2", "fused")]


def train_clipped(
    model: Any, optimizer_kind: str, rank: int = 0, world: int = 1
) -> dict[str, list[float]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = []

    def clip(step: int) -> None:
        foreach = optimizer_kind != "loop"
        norms.append(float(whole(nn.utils.clip_grad_norm_(parameters, 0.05, foreach=foreach))))

    optimizer = adamw(model, **OPTIMIZERS[optimizer_kind])
    losses = training.train(
        model, batches()[:4], rank, world, optimizer=optimizer, after_backward=clip
    )
    return {"losses": losses, "norms": norms}


def run_optimizers(rank: int, world: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    results = {}
    for how, kind in OPTIMIZER_CASES:
        mesh = init_device_mesh("cpu", (world,))
        model = wrapped(adapted(moe_qlora.expert_parallel(packed_model(), mesh)), how)
        results[how, kind] = train_clipped(model, kind, rank, world)
    return results


@pytest.fixture(scope="module")
def optimized(two: Any) -> list[Any]:
    return [result["optimizers"] for result in two]


@pytest.fixture(scope="module")
def clipped_alone() -> dict[str, list[float]]:
    return train_clipped(adapted(packed_model()), "loop")


@pytest.mark.parametrize("case", OPTIMIZER_CASES, ids="-".join)
def test_grouped_optimizers_and_clipping_as_in_one_process(
    case: tuple[str, str], optimized: list[Any], clipped_alone: dict[str, list[float]]
) -> None:
    for result in optimized:
        assert result[case]["losses"] == pytest.approx(clipped_alone["losses"], abs=1e-5)
        assert result[case]["norms"] == pytest.approx(clipped_alone["norms"], abs=1e-6)
    assert optimized[0][case]["norms"] == optimized[1][case]["norms"]


def test_second_level_blocks_of_two_ranks_keep_their_codes(
    loaded: Any, folders: dict[str, Path]
) -> None:
    for name, packed in packed_weights(load(folders["half blocks"], NF4)).items():
        for rank, one in enumerate(loaded):
            codes, weights = one["half blocks"][name]
            right = codec_of(packed.kind).cut(packed, rank * 2, rank * 2 + 2)
            assert torch.equal(codes, right.flat_codes)
            torch.testing.assert_close(weights, unpack(right), rtol=0.02, atol=1e-3)


def test_each_rank_loads_its_part_of_an_adapter(loaded: Any) -> None:
    alone = dict(adapted(packed_model()).named_parameters())
    for one in loaded:
        assert one["adapter"]
        for name, factor in one["adapter"].items():
            assert torch.equal(factor, alone[name]), name


def detect_on_one_rank(rank: int, mesh: Any) -> list[str]:
    model = moe_qlora.expert_parallel(packed_model(), mesh)
    # The other rank would be waited for, had detection run transformers' exchange of tokens.
    return [] if rank else [param.name for param in moe_qlora.detect(model)]


def test_detection_asks_no_other_rank(two: Any) -> None:
    names, nothing = (result["detected"] for result in two)
    assert names == [param.name for param in moe_qlora.detect(packed_model())]
    assert not nothing


def train_different_lengths(rank: int, mesh: Any) -> dict[str, Any]:
    model = moe_qlora.expert_parallel(packed_model(), mesh)
    model = adapted(model).train()
    ids = batches()[0][: 3 + 2 * rank, : 5 + rank]
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.requires_grad
    }


def test_ranks_may_have_different_numbers_of_tokens(two: Any) -> None:
    model = adapted(packed_model()).train()
    for rank in range(2):
        ids = batches()[0][: 3 + 2 * rank, : 5 + rank]
        (model(input_ids=ids, labels=ids).loss / 2).backward()
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.requires_grad
    }
    for gradients in (result["different lengths"] for result in two):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
