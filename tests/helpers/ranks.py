"""What tests on several ranks have in common."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_qlora.distributed.sharding import shards_integers
from moe_qlora.errors import MoeQloraError

from .folders import contents, same
from .training import whole

SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 6,
    "vocab_size": 256,
}  # fmt: skip
"""Of a model whose shares end within experts."""


def sharded(model: Any, **options: Any) -> Any:
    """The model, or PeftModel, under FSDP2: each decoder layer and the root, as a plain loop."""
    options.setdefault("mesh", init_device_mesh("cpu", (distributed.get_world_size(),)))
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and hasattr(module[0], "self_attn")
    ]
    with shards_integers():
        # Two stacks that share weights must be one group to torch, as are layers that do.
        for layer in stacks[0] if len(stacks) == 1 else ():
            fully_shard(layer, **options)
        return fully_shard(model, **options)


@contextmanager
def one_of_ranks(count: int) -> Iterator[None]:
    """Let this process be the first of some ranks: it gathers its own shares as theirs."""
    distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def said(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """The error of a call in words; "" without one."""
    try:
        call(*args, **named)
    except (MoeQloraError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_same_adapter(several: Path, single: Path) -> None:
    """The files of two adapters are equal; target_modules is a set, in any order."""
    both = contents(several), contents(single)
    configs = [json.loads(files.pop("adapter_config.json")) for files in both]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    assert "adapter_model.safetensors" in both[0] and both[0] == both[1]


def packed_bytes(model: nn.Module, gather: Callable[[Any], Any] = whole) -> dict[str, Any]:
    """Codes and statistics by name, gathered."""
    return {
        name.removeprefix("module."): gather(p).detach().as_subclass(torch.Tensor).clone()
        for name, p in model.named_parameters()
        if not p.is_floating_point()
    }


def are_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether names and bytes are: codes that are stored as floats may be NaN."""
    return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
