"""`moe-qlora bench [MODEL]`: how fast a model trains on the card that is here."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigError
from ..layout import human_bytes, parse_bytes
from ..versions import installed_version
from . import render
from .options import Color, Colored, Json, OptionalModel, trust_remote_code_of

if TYPE_CHECKING:
    from .measure import Measured, Sizes

EXAMPLES = (
    "moe-qlora bench",
    "moe-qlora bench gpt-oss-20b --layers 8 --micro-batch 4",
    "moe-qlora bench qwen3-30b-a3b --memory 24GiB",
)
_MODEL = "qwen3-30b-a3b"
_PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger-kernel")


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
    packed in nf4, attention and experts get LoRA, and moe_qlora.prepare_training sets the rest.

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
    lines: list[str] = []
    with render.working(f"Building {model}"):
        import torch

        from ..models import named
        from . import measure

        try:
            where = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"--device is {device!r}; give cuda, cuda:1 or cpu.") from None
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"--device is {device}, and no CUDA device is here; bench measures on a GPU: "
                "--device cpu runs a tiny model."
            )
        source = measure.sized(named.resolve(model, trust_remote_code=trust_remote_code), layers)
        sizes = measure.Sizes(seq, micro_batch, steps, memory, where)
        torch.manual_seed(0)
        found = measure.measured(source, sizes, lines.append)
    row = _row(model, source.config.get_text_config().num_hidden_layers, sizes, found)
    if as_json:
        render.print_json({**row, "prepared": lines})
        return
    for line in lines:
        render.say(out, line)
    out.line()
    peak, reserved = map(_size, (found.peak, found.reserved))
    cells = (f"{found.tokens_per_second:,.0f}", peak, reserved, found.setting)
    headings = (">tokens/s", ">peak", ">reserved", "layers")
    render.show_table(out, f"Training on {row['gpu']}", headings, [cells])
    writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
    writer.writeheader()
    writer.writerow({name: "" if value is None else value for name, value in row.items()})


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else human_bytes(nbytes)


def _row(model: str, layers: int, sizes: Sizes, found: Measured) -> dict[str, Any]:
    """Return the row that can be published: sizes in bytes, None for what was not measured."""
    import torch

    cuda = sizes.device.type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(sizes.device) if cuda else "cpu",
        "moe_qlora": __version__,
        **{name: installed_version(name) for name in _PACKAGES},
        "model": model.rstrip("/").rpartition("/")[2],  # a folder's path is nobody's business
        "layers": layers,
        "seq": sizes.seq,
        "micro_batch": sizes.micro_batch,
        "steps": sizes.steps,
        "memory": sizes.memory,
        "setting": found.setting,
        "tokens_per_second": round(found.tokens_per_second, 1),
        "peak": found.peak,
        "reserved": found.reserved,
    }
