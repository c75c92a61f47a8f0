"""`moe-qlora bench [MODEL]`: how fast a model trains on the card that is here."""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ConfigError
from ..layout import human_bytes
from ..versions import installed_version
from . import options as opt
from . import render

if TYPE_CHECKING:
    import torch

    from ..models.named import Source

EXAMPLES = (
    "moe-qlora bench",
    "moe-qlora bench gpt-oss-20b --layers 8 --micro-batch 4",
    "moe-qlora bench qwen3-30b-a3b --memory 24GiB",
)
_PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger-kernel")
_WARMUP = 4  # steps: one that compiles, two that record, one more


def bench(
    model: opt.OptionalModel = None,
    layers: int | None = opt.option("Decoder layers to keep; default: all."),
    seq: int = opt.option("Tokens in a sequence.", default=4096, min=2),
    micro_batch: int = opt.option("Sequences in a step.", default=1, min=1),
    steps: int = opt.option("Steps that are measured.", default=12, min=1),
    memory: str | None = opt.option("What a step may take, such as 24GiB; default: the card's."),
    device: str = opt.option("cuda, cuda:1, or cpu for a tiny model.", default="cuda"),
    as_json: opt.Json = False,
    trust_remote_code: opt.Remote = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Train MODEL with random weights for some steps, and print tokens a second and memory.

    MODEL is qwen3-30b-a3b where it is left out; nothing but its configuration is read. Experts are
    packed in nf4, attention and experts get LoRA in bfloat16, AdamW trains it, and
    moe_qlora.prepare_training sets the rest. Linear layers stay in bfloat16. The last two lines are
    a row of CSV and its heading, which can be published as they are.
    """
    model = model or "qwen3-30b-a3b"
    with render.working(f"Building {model}"):
        import torch

        from ..models import named

        try:
            where = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"--device is {device!r}; give cuda, cuda:1 or cpu.") from None
        if where.type == "cuda" and not torch.cuda.is_available():
            cure = "bench measures on a GPU: --device cpu runs a tiny model"
            raise ConfigError(f"--device is {device}, and no CUDA device is here; {cure}.")
        source = shortened(named.resolve(model, trust_remote_code=trust_remote_code), layers)
        prepared, measured = train(source, where, (micro_batch, seq), steps, memory)
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "moe_qlora": __version__,
        **{name: installed_version(name) for name in _PACKAGES},
        "model": model.rstrip("/").rpartition("/")[2],  # a folder's path is nobody's business
        "layers": source.config.get_text_config().num_hidden_layers,
        "seq": seq, "micro_batch": micro_batch, "steps": steps, "memory": memory, **measured,
    }  # fmt: skip
    if as_json:
        render.print_json({**row, "prepared": prepared})
        return
    sizes = [f", {human_bytes(row[name])} {name}" for name in ("peak", "reserved") if row[name]]
    speed = f"{row['tokens_per_second']:,.0f} tokens/s on {row['gpu']}{''.join(sizes)}"
    for line in (*prepared, f"{speed}; layers: {row['setting']}."):
        render.say(render.console(color.value), line)
    writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)


def shortened(source: Source, layers: int | None) -> Source:
    """Return a model's configuration in bfloat16, with its first `layers` decoder layers."""
    import torch

    had = source.config.get_text_config().num_hidden_layers
    if layers is not None and not 1 <= layers <= had:
        raise ConfigError(f"--layers is {layers}, and {source.label} has 1 to {had} layers.")

    config = deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    config.dtype = torch.bfloat16
    text: Any = config.get_text_config()
    for name, value in vars(text).items():  # lists have an entry for each layer
        if isinstance(value, list) and len(value) == had:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers or had
    return replace(source, config=config, settings=None, folder=None)


def train(
    source: Source, device: torch.device, shape: tuple[int, int], steps: int, memory: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Train packed experts with LoRA, and return `prepare_training`'s lines and figures."""
    import torch

    from ..detection.detect import detect
    from ..lora.model import get_peft_model
    from ..models import named
    from ..packing import codec, parametrize
    from ..planning.model import lora_config_of
    from ..quantize import quantize_experts
    from ..testing import fill_randomly
    from ..train.prepare import prepare_training

    built, settings = named.build(source), opt.codec_settings(None, None, None)
    if not (experts := tuple(detect(built))):
        raise ConfigError(f"{source.label} has no fused expert weights, which bench would pack.")

    def pack(name: str, module: torch.nn.Module) -> None:
        for param in experts:
            if param.module_name == name:
                packed = codec.pack(module.get_parameter(param.parameter_name).data, settings)
                parametrize.attach(module, param.parameter_name, packed)

    torch.manual_seed(0)
    try:
        model: Any = fill_randomly(built, device, pack)
        quantize_experts(model, settings.bnb_fields(), progress=False)
        lora = lora_config_of(model, (), "attention", 16)
        adapted = get_peft_model(model, lora, experts=True, autocast_adapter_dtype=False)
        sizes: dict[str, Any] = dict(zip(("batch_size", "seq_len"), shape, strict=True))
        with prepare_training(adapted, **sizes, memory=memory) as prepared:
            kept = Counter(layer.activations for layer in getattr(prepared.fit, "layers", ()))
            levels = ", ".join(f"{kept[name]} {name}" for name in ("keep", "part", "recompute"))
            seconds = _steps(adapted, device, shape, steps)
    except torch.OutOfMemoryError:
        cure = "take fewer --layers, a shorter --seq or less --memory"
        raise ConfigError(f"{source.label} ran out of memory: {cure}.") from None
    most = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return str(prepared).splitlines(), {
        "setting": levels if kept else "not prepared",
        "tokens_per_second": round(math.prod(shape) / statistics.median(seconds), 1),
        "peak": most.get("allocated_bytes.all.peak"),
        "reserved": most.get("reserved_bytes.all.peak"),
    }


def _steps(model: Any, device: torch.device, shape: tuple[int, int], steps: int) -> list[float]:
    import torch

    text, on_gpu = model.config.get_text_config(), device.type == "cuda"
    text.use_cache = False
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    for _ in range(_WARMUP + steps):
        ids = torch.randint(text.vocab_size, shape).to(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds[_WARMUP:]
