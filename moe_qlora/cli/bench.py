"""`moe-qlora bench [MODEL]`: how fast a model trains on the card that is here."""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigError
from ..layout import human_bytes, parse_bytes
from ..versions import installed_version
from . import render
from .options import Color, Colored, Json, OptionalModel, codec_settings, trust_remote_code_of

if TYPE_CHECKING:
    import torch

    from ..models.named import Source

EXAMPLES = (
    "moe-qlora bench",
    "moe-qlora bench gpt-oss-20b --layers 8 --micro-batch 4",
    "moe-qlora bench qwen3-30b-a3b --memory 24GiB",
)
RANK = 16
_MODEL = "qwen3-30b-a3b"
_PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger-kernel")
_WARMUP = 4  # steps: one that compiles, two that record, one more
_LEARNING_RATE = 1e-4


def bench(
    model: OptionalModel = None,
    layers: Annotated[
        int | None, typer.Option(help="Decoder layers to keep; default: all.")
    ] = None,
    seq: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 12,
    memory: Annotated[
        str | None,
        typer.Option(help="What a step may take, such as 24GiB; default: what the card has."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu for a tiny model.")] = "cuda",
    as_json: Json = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("MODEL")] = False,
    color: Colored = Color.auto,
) -> None:
    """Train MODEL with random weights for some steps, and print tokens a second and memory.

    MODEL is qwen3-30b-a3b where it is left out; nothing but its configuration is read. Experts are
    packed in nf4, attention and experts get LoRA in bfloat16, AdamW trains it, and
    moe_qlora.prepare_training sets the rest. Linear layers stay in bfloat16.

    The last two lines are a row of CSV and its heading, which can be published as they are.
    """
    from ..models.files import place_of

    model = model or _MODEL
    place_of(model)
    if memory is not None:
        try:
            parse_bytes(memory)
        except ValueError:
            raise ConfigError(
                f"--memory is {memory!r}; give a size with its unit, such as 24GiB."
            ) from None
    out = render.console(color.value)
    with render.working(f"Building {model}"):
        import torch

        from ..models import named

        try:
            where = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"--device is {device!r}; give cuda, cuda:1 or cpu.") from None
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"--device is {device}, and no CUDA device is here; bench measures on a GPU: "
                "--device cpu runs a tiny model."
            )
        source = shortened(named.resolve(model, trust_remote_code=trust_remote_code), layers)
        prepared, measured = train(source, where, (micro_batch, seq), steps, memory)
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "moe_qlora": __version__,
        **{name: installed_version(name) for name in _PACKAGES},
        "model": model.rstrip("/").rpartition("/")[2],  # a folder's path is nobody's business
        "layers": source.config.get_text_config().num_hidden_layers,
        "seq": seq,
        "micro_batch": micro_batch,
        "steps": steps,
        "memory": memory,
        **measured,
    }
    if as_json:
        render.print_json({**row, "prepared": prepared})
        return
    for line in prepared:
        render.say(out, line)
    sizes = ("-" if row[name] is None else human_bytes(row[name]) for name in ("peak", "reserved"))
    out.line()
    render.show_table(
        out,
        f"Training on {row['gpu']}",
        ["model", ">tokens/s", ">peak", ">reserved", "layers"],
        [
            (
                "nf4 experts, LoRA on attention and experts",
                f"{row['tokens_per_second']:,.0f}",
                *sizes,
                str(row["setting"]),
            )
        ],
    )
    writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
    writer.writeheader()
    writer.writerow({name: "" if value is None else value for name, value in row.items()})


def shortened(source: Source, layers: int | None) -> Source:
    """Return a model's configuration in bfloat16, with its first `layers` decoder layers."""
    import torch

    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    if layers is not None:
        had = source.config.get_text_config().num_hidden_layers
        if not 1 <= layers <= had:
            raise ConfigError(f"--layers is {layers}, and {source.label} has 1 to {had} layers.")
        fields = _cut(fields, had, layers)
    config = type(source.config).from_dict(fields)
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


def train(
    source: Source, device: torch.device, shape: tuple[int, int], steps: int, memory: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Train packed experts with LoRA after `prepare_training`.

    Args:
        source: The model's configuration.
        device: Where it is trained.
        shape: Sequences in a step, and tokens in each.
        steps: Steps that are measured, after `_WARMUP` others.
        memory: As `prepare_training` takes it.

    Returns:
        The lines of its choice; "setting", "tokens_per_second" (median), and "peak" and "reserved"
        in bytes, None on a CPU.

    Raises:
        ConfigError: The model has no experts, or a step does not fit.
    """
    import torch
    from torch import nn

    from ..detection.detect import detect
    from ..integrations.prepare import prepare_training
    from ..lora.model import get_peft_model
    from ..memory.meta_model import lora_config_of
    from ..models import named
    from ..packing import codec, parametrize
    from ..quantize import quantize_experts
    from ..testing import fill_randomly

    built = named.build(source)
    stacks: dict[str, list[str]] = {}
    for param in detect(built):
        stacks.setdefault(param.module_name, []).append(param.parameter_name)
    if not stacks:
        raise ConfigError(f"{source.label} has no fused expert weights, which bench would pack.")
    settings = codec_settings(None, None, None)

    def pack(name: str, module: nn.Module) -> None:
        for parameter in stacks.get(name, ()):
            packed = codec.pack(module.get_parameter(parameter).data, settings)
            parametrize.attach(module, parameter, packed)

    torch.manual_seed(0)
    try:
        model: Any = fill_randomly(built, device, pack)
        quantize_experts(model, settings.bnb_fields(), progress=False)
        config = lora_config_of(model, (), "attention", RANK)
        adapted = get_peft_model(model, config, experts=True, autocast_adapter_dtype=False)
        batch_size, seq_len = shape
        with prepare_training(
            adapted, batch_size=batch_size, seq_len=seq_len, memory=memory
        ) as prepared:
            kept = Counter(layer.activations for layer in getattr(prepared.fit, "layers", ()))
            levels = ", ".join(f"{kept[name]} {name}" for name in ("keep", "part", "recompute"))
            seconds = _seconds_of_steps(adapted, device, shape, steps)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{source.label} ran out of memory with {shape[0]} x {shape[1]} tokens in a step: take "
            "fewer --layers or a shorter --seq, or set --memory to what other programs leave free "
            "on this card; moe-qlora plan says what takes how much."
        ) from None
    cuda = device.type == "cuda"
    return str(prepared).splitlines(), {
        "setting": levels if kept else "not prepared",
        "tokens_per_second": round(math.prod(shape) / statistics.median(seconds), 1),
        "peak": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved": torch.cuda.max_memory_reserved(device) if cuda else None,
    }


def _seconds_of_steps(
    model: Any, device: torch.device, shape: tuple[int, int], steps: int
) -> list[float]:
    import torch

    text = model.config.get_text_config()
    text.use_cache = False
    cuda = device.type == "cuda"
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=cuda)
    generator = torch.Generator().manual_seed(0)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    loss = 0.0
    for _ in range(_WARMUP + steps):
        ids = torch.randint(text.vocab_size, shape, generator=generator).to(device)
        start = time.perf_counter()
        out = model(input_ids=ids, labels=ids).loss
        out.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = out.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    if not math.isfinite(loss):
        raise ConfigError(f"the loss of random weights is {loss}, so that no time counts.")
    return seconds[_WARMUP:]
