"""Packed models with adapters, training of them on one or several ranks, and how runs compare."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType
from peft import LoraConfig
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_inputs, tiny_model

Run = tuple[Any, dict[str, Tensor]]
"""What training recorded: a loss or several, and gradients or trained weights by name."""
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "bf16 storage": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
}


def loaded(folder: Any, settings: Any = NF4, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    """A model of packed experts and packed Linear layers, in fp32; None: of a packed folder."""
    if settings is not None:
        made = BitsAndBytesConfig(**settings) if isinstance(settings, dict) else settings
        more["quantization_config"] = made
    with moe_qlora.enabled():
        return kind.from_pretrained(folder, **{"dtype": torch.float32, **more})


def is_enabled() -> bool:
    return AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__name__.startswith("Packing")


def packed(model_type: str = "qwen3_moe", settings: Any = NF4, **sizes: Any) -> Any:
    """A tiny model whose experts alone are packed."""
    model = tiny_model(model_type, **sizes)
    moe_qlora.quantize_experts(model, settings)
    return model


def packed_names(model: nn.Module) -> list[str]:
    return [f"{module}.{name}" for module, _, name in parametrize.iter_packed(model)]


def adapted_layers(model: nn.Module) -> set[str]:
    """Names in the base model of the modules that have LoRA."""
    names = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    return {name.removeprefix("base_model.model.") for name in names}


def lora(model: Any, *targets: str, **settings: Any) -> Any:
    """The model with small adapters, as they are made, on its experts and on these layers."""
    config = LoraConfig(r=2, target_modules=[*targets], **settings)
    return moe_qlora.get_peft_model(model, config, experts=True)


def adapted(model: Any, modules: Sequence[str] = ("q_proj", "v_proj"), **settings: Any) -> Any:
    """The model with adapters on attention and experts that change what it computes."""
    torch.manual_seed(1)
    targets = modules if isinstance(modules, str) else [*modules]
    config = LoraConfig(r=3, lora_alpha=8, target_modules=targets, **settings)
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return peft_model


def results(model: Any) -> dict[str, Tensor]:
    """The outputs for a tiny batch, and the gradients of all that is trained."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    torch.manual_seed(3)
    output = model(**tiny_inputs(base))
    out = output.logits if "logits" in output else output.last_hidden_state
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {"out": out.detach()}
    if trained:
        grads = torch.autograd.grad(out, list(trained.values()), seed, allow_unused=True)
        found |= {n: g for n, g in zip(trained, grads, strict=True) if g is not None}
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Names and values of two results are equal, bit for bit."""
    assert_same_training((0, left), (0, right))


def assert_same_training(run: Run, expected: Run, within: float = 0.0) -> None:
    """Two runs recorded the same: bit for bit, or tensors `within` this part of their norm.

    Losses are then within a tenth of that part.
    """
    assert run[0] == (pytest.approx(expected[0], rel=within / 10) if within else expected[0])
    assert run[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        if not within:
            assert torch.equal(run[1][name], tensor), name
            continue
        error = (run[1][name].float() - tensor.float()).norm()
        assert error <= within * tensor.float().norm() + 1e-8, f"{name} differs by {error:.2e}"


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **options)


def train(
    model: Any, batches: Iterable[Tensor], rank: int = 0, world: int = 1, *, group: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    after_backward: Callable[[int], None] | None = None,
) -> list[float]:  # fmt: skip
    """Train a step on this rank's rows of each batch of token ids; return the ranks' mean losses.

    `after_backward` is called with the number of the step, before that of the optimizer.
    """
    model.train()
    optimizer = optimizer or adamw(model)
    losses = []
    for step, ids in enumerate(batches):
        own = ids.chunk(world)[rank]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        if after_backward is not None:
            after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss, world, group))
    return losses


def record(model: Any, batches: Iterable[Tensor], rank: int = 0, world: int = 1) -> Run:
    """Train as `train` does; return the losses, and the first step's gradients, gathered."""
    gradients: dict[str, Tensor] = {}

    def keep(step: int) -> None:
        if step == 0:
            gradients.update(whole_gradients(model))

    return train(model, batches, rank, world, after_backward=keep), gradients


def mean_of_ranks(value: Tensor, world: int, group: Any = None) -> float:
    mean = value.detach().float().clone()
    if world > 1:
        distributed.all_reduce(mean, group=group)
    return float(mean) / world


def whole(tensor: Any) -> Tensor:
    """A DTensor gathered, and any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that is trained, by name, gathered."""
    named = model.named_parameters()
    return {name: whole(p).detach().clone() for name, p in named if p.requires_grad}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by name, without the prefix of `DistributedDataParallel`."""
    return {
        name.removeprefix("module."): whole(parameter.grad).float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def four_steps(folder: Path, world: int, **options: Any) -> TrainingArguments:
    """Arguments of a run of four steps, saved after the second one too."""
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=12 // world, max_steps=4, save_steps=2,
        logging_steps=1, learning_rate=1e-2, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip


def trainer_of(model: Any, arguments: TrainingArguments) -> Trainer:
    """A Trainer on two batches of twelve rows."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 248, (8,), generator=generator) for _ in range(24)]
    return Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])


def logged_losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def take_fsdp_on_cpus() -> None:
    """Let accelerate shard on CPUs; by itself it takes its plugin on GPUs alone."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if self.__dict__.get("fsdp_plugin") is not None:  # a later call takes it back
            self.distributed_type = DistributedType.FSDP
        torch.set_num_threads(1)

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def token_batches(first: int, last: int, rows: int) -> list[Tensor]:
    generators = (torch.Generator().manual_seed(step) for step in range(first, last))
    return [torch.randint(5, 248, (rows, 8), generator=generator) for generator in generators]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves."""
    state = state_dict.get_optimizer_state_dict(model, optimizer)
    return {"model": state_dict.get_model_state_dict(model), "optimizer": state}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **named: Any) -> None:
    """Load what it has saved, by any number of ranks."""
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder, **named)
    state_dict.set_model_state_dict(model, state["model"])
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"])
