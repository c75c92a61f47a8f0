"""What `moe-qlora bench` measures: training steps of a model of random weights, on one device.

Only experts are packed; Linear layers stay in bfloat16. Adapters are in bfloat16, and AdamW trains
them on random tokens.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..detection.detect import detect
from ..errors import ConfigError
from ..integrations.prepare import prepare_training
from ..layout import human_bytes, parse_bytes
from ..lora.model import get_peft_model
from ..memory.meta_model import lora_config_of
from ..memory.plan import plan
from ..models import named
from ..models.named import Source
from ..packing import codec, parametrize
from ..quantize import quantize_experts
from ..testing import fill_randomly
from .options import codec_settings

RANK = 16
_WARMUP = 4  # steps: one that compiles, two that record, one more
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """What is run: `micro_batch` sequences of `seq` tokens in each of `steps` steps."""

    seq: int
    micro_batch: int
    steps: int
    memory: str | None
    device: torch.device


@dataclass(frozen=True)
class Measured:
    """How fast a model trained: tokens a second (median), and bytes; None on a CPU."""

    setting: str
    tokens_per_second: float
    peak: int | None
    reserved: int | None


def sized(source: Source, layers: int | None) -> Source:
    """Return a model's configuration in bfloat16, with its first `layers` decoder layers."""
    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    if layers is not None:
        had = source.config.get_text_config().num_hidden_layers
        if not 1 <= layers <= had:
            raise ConfigError(f"--layers is {layers}, and {source.label} has 1 to {had} layers.")
        fields = _cut(fields, had, layers)
    config: PretrainedConfig = type(source.config).from_dict(fields)
    config.dtype = torch.bfloat16
    return replace(source, config=config, settings=None, folder=None)


def _cut(fields: dict[str, Any], had: int, layers: int) -> dict[str, Any]:
    """Return fields with fewer layers, lists with an entry for each layer included."""
    cut = dict(fields)
    for key, value in fields.items():
        if isinstance(value, dict) and value.get("num_hidden_layers") == had:
            cut[key] = _cut(value, had, layers)
        elif isinstance(value, list) and len(value) == had:
            cut[key] = value[:layers]
    return cut | {"num_hidden_layers": layers}


def measured(source: Source, sizes: Sizes, say: Callable[[str], None]) -> Measured:
    """Measure packed experts, LoRA on attention and experts, after `prepare_training`.

    `say` gets the lines of its choice. A step that does not fit is a `ConfigError`.
    """
    built = named.build(source)
    stacks: dict[str, list[str]] = {}
    for param in detect(built):
        stacks.setdefault(param.module_name, []).append(param.parameter_name)
    if not stacks:
        raise ConfigError(f"{source.label} has no fused expert weights, which bench would pack.")
    _check_room(source, sizes, built)
    settings = codec_settings(None, None, None)

    def pack(name: str, module: nn.Module) -> None:
        for parameter in stacks.get(name, ()):
            packed = codec.pack(module.get_parameter(parameter).data, settings)
            parametrize.attach(module, parameter, packed)

    model: Any = fill_randomly(built, sizes.device, pack)
    quantize_experts(model, settings.bnb_fields(), progress=False)
    config = lora_config_of(model, (), "attention", RANK)
    adapted = get_peft_model(model, config, experts=True, autocast_adapter_dtype=False)
    with (
        _quiet("moe_qlora.lora.inject"),  # says what is packed, as training starts
        prepare_training(
            adapted, batch_size=sizes.micro_batch, seq_len=sizes.seq, memory=sizes.memory
        ) as prepared,
    ):
        for line in str(prepared).splitlines():
            say(line)
        kept = Counter(layer.activations for layer in getattr(prepared.fit, "layers", ()))
        levels = [f"{kept[level]} {level}" for level in ("keep", "part", "recompute")]
        try:
            return _trained(adapted, sizes, ", ".join(levels) if kept else "not prepared")
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{source.label} ran out of memory with {sizes.micro_batch} x {sizes.seq} tokens "
                "in a step: set --memory to what other programs leave free on this card."
            ) from None


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_room(source: Source, sizes: Sizes, built: nn.Module) -> None:
    """Refuse a step that does not fit by `plan`, whose figures bound those of compiled layers."""
    if sizes.device.type != "cuda":
        return
    room = torch.cuda.get_device_properties(sizes.device).total_memory
    if sizes.memory is not None:
        room = parse_bytes(sizes.memory)
    linears = (name for name, module in built.named_modules() if isinstance(module, nn.Linear))
    report = plan(
        source,
        replace(codec_settings(None, None, None), skip_modules=tuple(linears)),
        gpus=room,
        batch=sizes.micro_batch,
        seq=sizes.seq,
        rank=RANK,
        targets="attention,experts",
        adapter_dtype="bfloat16",
        checkpointing=True,
        liger=True,
        search=False,
    )
    if not report.fits:
        raise ConfigError(
            f"{source.label} does not fit {human_bytes(room)} with {sizes.micro_batch} x "
            f"{sizes.seq} tokens in a step: take fewer --layers or a shorter --seq; "
            "moe-qlora plan says what takes how much."
        )


def _trained(model: Any, sizes: Sizes, setting: str) -> Measured:
    """Train for some steps, and measure all but the first ones."""
    text = model.config.get_text_config()
    text.use_cache = False
    cuda = sizes.device.type == "cuda"
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=cuda)
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.micro_batch, sizes.seq)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(sizes.device)
    seconds: list[float] = []
    loss = 0.0
    for _ in range(_WARMUP + sizes.steps):
        ids = torch.randint(text.vocab_size, shape, generator=generator).to(sizes.device)
        start = time.perf_counter()
        out = model(input_ids=ids, labels=ids).loss
        out.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = out.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    if not math.isfinite(loss):
        raise ConfigError(f"the loss of random weights is {loss}, so that no time counts")
    return Measured(
        setting,
        sizes.micro_batch * sizes.seq / statistics.median(seconds[_WARMUP:]),
        torch.cuda.max_memory_allocated(sizes.device) if cuda else None,
        torch.cuda.max_memory_reserved(sizes.device) if cuda else None,
    )
