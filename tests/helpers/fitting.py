"""Tiny models for `fit_memory`, and a count of the tensors that are alive in their steps."""

import copy
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning.model import packed_parts
from moe_qlora.testing import tiny_model
from moe_qlora.train.offload import held_tensors
from tests.helpers import training
from tests.helpers.small_models import fill

BATCH, SEQ = 2, 48
_built: dict[str, Any] = {}
ENOUGH = 1 << 40
_LINEARS = ("q_proj", "v_proj", "o_proj")


def adapted(
    model_type: str = "qwen3_moe", *, kind: str = "4bit", double: bool = False, **overrides: Any
) -> Any:
    key = f"{model_type} {kind} {double} {overrides}"
    if key not in _built:
        model = tiny_model(model_type, seed=0, **overrides)
        settings = {f"load_in_{kind}": True, "bnb_4bit_use_double_quant": double}
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(**settings))
        _built[key] = with_lora(model)
        _built[key].equal_models = key
    return copy.deepcopy(_built[key])


def with_lora(model: Any, *, dropout: float = 0.0, experts: bool = True) -> Any:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in _LINEARS if name in names]
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout)
    peft_model = moe_qlora.get_peft_model(model, config, experts=experts, unpacked_ok=True)
    return fill(peft_model, size=0.05).train()


def token_ids(model: Any, batch: int = BATCH, seq: int = SEQ, seed: int = 7) -> Tensor:
    """Random ids, none of a special token."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary - 8, (batch, seq), generator=generator)


def fitted(model: Any, memory: Any = ENOUGH, **sizes: Any) -> Any:
    return moe_qlora.fit_memory(
        model, **{"batch_size": BATCH, "seq_len": SEQ, "memory": memory, **sizes}
    )


def least_memory(model: Any, batch: int = BATCH, seq: int = SEQ, **how: Any) -> int:
    """The bytes of a step that computes all again, by what the error says is missing."""
    with pytest.raises(moe_qlora.ConfigError, match=r"bytes are missing") as error:
        fitted(model, 1, batch_size=batch, seq_len=seq, **how)
    found = re.search(r"(\d+) bytes are missing", str(error.value))
    assert found is not None
    return 1 + int(found[1])


def train(model: Any, ids: Tensor, steps: int = 3) -> training.Run:
    """Losses of steps of AdamW, and the gradients of the last."""
    last: dict[str, Tensor] = {}
    model.zero_grad()
    torch.manual_seed(3)
    keep = lambda _: last.update(training.whole_gradients(model))  # noqa: E731
    return training.train(model, [ids] * steps, after_backward=keep), last


def measured_peak(model: Any, ids: Tensor, loss_of: Callable[..., Tensor] | None = None) -> int:
    """The most bytes of tensors at once in steps of AdamW, weights and states included.

    Experts in host memory are not.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    statistics = [tensor for part in packed_parts(base) for tensor in part.weight.statistics]
    live = Live([*model.parameters(), *model.buffers(), *statistics], hosted_tensors(base))
    with live:
        for _ in range(2):
            batch = {"input_ids": ids, "labels": ids}
            loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def hosted_tensors(model: Any) -> list[Tensor]:
    """Codes and statistics that lie in host memory."""
    lists = [module for module in model.modules() if getattr(module, "host", None) is not None]
    return [tensor for each in lists for tensor in held_tensors(each)]


class Live(TorchDispatchMode):
    """Counts the bytes of storages from their making until they die, but those of `elsewhere`."""

    def __init__(self, known: Iterable[Tensor], elsewhere: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in elsewhere}
        for tensor in known:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen and not tensor.is_meta:
            self.seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.die, key, size).atexit = False

    def die(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out
