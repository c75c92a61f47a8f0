"""What `moe-qlora bench` measures: training steps of a model of random weights, on one device.

Only experts are packed; Linear layers stay in bfloat16, here and in the model beside it. Adapters
are in bfloat16, and AdamW trains them on random tokens.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from torch import nn
from transformers import PretrainedConfig

from ..detection.detect import detect
from ..errors import ConfigError, MoeQloraError, first_line
from ..experts.backend import has_triton
from ..integrations.liger import apply_liger
from ..integrations.prepare import prepare_training
from ..kernels import workspace
from ..layout import human_bytes, parse_bytes
from ..lora.model import get_peft_model
from ..memory.meta_model import lora_config_of
from ..memory.plan import plan_settings
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

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.micro_batch

    def room(self) -> int | None:
        """Return the bytes that a step may take; None on a CPU without `memory`."""
        if self.memory is not None:
            return parse_bytes(self.memory)
        if self.device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self.device).total_memory


@dataclass(frozen=True)
class Measured:
    """How fast one model trained: tokens a second (median), and bytes; None on a CPU."""

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


def ours(source: Source, sizes: Sizes, say: Callable[[str], None]) -> Measured:
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


def frozen(source: Source, sizes: Sizes) -> Measured:
    """Measure bfloat16 experts without LoRA, which attention has, with what makes that quick.

    Where this does not fit by `plan`, or fails, a `ConfigError` says why.
    """
    built = named.build(source)
    room = sizes.room()
    keeps = room is None or _fits(source, sizes, built, room, packed=False, keeps=True)
    if not keeps:
        assert room is not None
        if not _fits(source, sizes, built, room, packed=False, keeps=False):
            raise ConfigError(f"does not fit {human_bytes(room)} by plan")
    model: Any = fill_randomly(built, sizes.device)
    adapted: Any = peft.get_peft_model(
        model, lora_config_of(model, (), "attention", RANK), autocast_adapter_dtype=False
    )
    try:
        with _quick(adapted, keeps) if sizes.device.type == "cuda" else nullcontext():
            return _trained(adapted, sizes, "all kept" if keeps else "all computed again")
    except torch.OutOfMemoryError:
        raise ConfigError("ran out of memory, which plan did not expect") from None
    except MoeQloraError:
        raise
    except Exception as error:
        raise ConfigError(f"failed ({type(error).__name__}: {first_line(error)})") from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _quick(adapted: Any, keeps: bool) -> Iterator[None]:
    """Give a model every setting of `prepare_training` that is not this package's experts'."""
    from ..speed.graphs import graph_layers

    base = adapted.get_base_model()
    base.set_experts_implementation("grouped_mm")
    with ExitStack() as stack:
        with suppress(ConfigError):
            stack.enter_context(apply_liger(base, in_layers=not has_triton()))
        stack.enter_context(graph_layers(adapted, compiled=has_triton(), keep=keeps))
        yield


def release() -> None:
    """Give back what nobody holds any more, compiled code and this package's workspace included."""
    workspace.release_workspace()
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _fits(
    source: Source, sizes: Sizes, built: nn.Module, room: int, *, packed: bool, keeps: bool
) -> bool:
    """Return whether a step fits by `plan`, whose figures are upper bounds of compiled layers."""
    skip = [name for name, module in built.named_modules() if isinstance(module, nn.Linear)]
    if not packed:
        skip += [param.module_name for param in detect(built)]
    asked = {
        "batch": sizes.micro_batch,
        "seq": sizes.seq,
        "rank": RANK,
        "targets": "attention,experts" if packed else "attention",
        "adapter_dtype": "bfloat16",
        "checkpointing": not keeps,
        "prepared": sizes.device.type == "cuda",
    }
    packing = replace(codec_settings(None, None, None), skip_modules=tuple(skip))
    return plan_settings(source, packing, asked, gpus=room, search=False).fits is True


def _check_room(source: Source, sizes: Sizes, built: nn.Module) -> None:
    room = sizes.room() if sizes.device.type == "cuda" else None
    if room is not None and not _fits(source, sizes, built, room, packed=True, keeps=False):
        raise ConfigError(
            f"{source.label} does not fit {human_bytes(room)} with {sizes.micro_batch} x "
            f"{sizes.seq} tokens in a step: take fewer --layers or a shorter --seq; "
            "moe-qlora plan says what takes how much."
        )


def _trained(model: Any, sizes: Sizes, setting: str) -> Measured:
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
        sizes.tokens / statistics.median(seconds[_WARMUP:]),
        torch.cuda.max_memory_allocated(sizes.device) if cuda else None,
        torch.cuda.max_memory_reserved(sizes.device) if cuda else None,
    )
