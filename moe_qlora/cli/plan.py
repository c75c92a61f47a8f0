"""`moe-qlora plan MODEL`: print what a model takes on its devices, loading and in training."""

from __future__ import annotations

from itertools import zip_longest
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .options import (
    Color,
    Colored,
    Json,
    Model,
    ModelDoubleQuant,
    ModelQuant,
    Subcommand,
    gpu_names,
    packed_as,
    trust_remote_code_of,
)

if TYPE_CHECKING:
    from ..planning.report import MemoryPlan

DOES_NOT_FIT = 4
EXAMPLES = (
    "moe-qlora plan qwen3-30b-a3b --gpus 24GiB",
    "moe-qlora plan ./model --gpus 4090 --seq 2048 --targets experts",
    "moe-qlora plan ./model --gpus 8xH100 --fsdp 8",
    "moe-qlora plan qwen3-30b-a3b --gpus 4090 --targets attention,experts",
)
_ALL = -1  # What stands for a --ddp without a number


class PlanCommand(Subcommand):
    """The subcommand, whose `--ddp` may be without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put a number behind each `--ddp` that has none."""
        filled = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            filled.append(word)
            if word == "--ddp" and not following.isdecimal():
                filled.append(str(_ALL))
        return super().parse_args(ctx, filled)


Gpus = Annotated[
    str | None,
    typer.Option(help="Devices: 24GiB, 4090, 8xH100, or 24GiB,2x48GiB.", autocompletion=gpu_names),
]


def _setting(what: str, default: str, *names: str) -> Any:
    """Return an option that is None where it is left out, so that the search may set it."""
    return typer.Option(*names, help=f"{what}; default: {default}.")


Targets = Annotated[
    str | None,
    _setting("What gets LoRA: attention, all-linear, experts, or names, by comma", "attention"),
]
AdapterDtype = Annotated[
    str | None, _setting("Of the adapters: float32 (PEFT's default) or bfloat16", "float32")
]
Optimizer = Annotated[
    str | None, _setting("adamw, adamw_8bit, paged_adamw or paged_adamw_8bit", "adamw")
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="attn_implementation of from_pretrained: eager, sdpa, flex_attention or a flash "
        "kernel; default: transformers' choice."
    ),
]
Checkpointing = Annotated[
    bool | None,
    _setting("Compute layers again in backward", "yes", "--checkpointing/--no-checkpointing"),
]
Prepared = Annotated[
    bool | None,
    typer.Option(
        "--prepared/--no-prepared",
        help="With prepare_training, whose loss is Liger's where it knows the model.",
    ),
]
Offload = Annotated[
    bool | None,
    typer.Option("--offload/--no-offload", help="Packed experts in host memory."),
]
Fsdp = Annotated[int | None, typer.Option(help="Ranks that share the model under FSDP2.")]
Ddp = Annotated[
    int | None,
    typer.Option(
        metavar="[INTEGER]", help="Ranks under DDP; without a number as many as --gpus names."
    ),
]


def plan(
    model: Model,
    gpus: Gpus = None,
    ddp: Ddp = None,
    fsdp: Fsdp = None,
    seq: Annotated[int | None, _setting("Tokens in a sequence", "4096")] = None,
    batch: Annotated[int | None, _setting("Sequences in a micro-batch", "1")] = None,
    rank: Annotated[int | None, _setting("LoRA rank", "16")] = None,
    targets: Targets = None,
    adapter_dtype: AdapterDtype = None,
    optimizer: Optimizer = None,
    checkpointing: Checkpointing = None,
    attention: Attention = None,
    prepared: Prepared = None,
    offload: Offload = None,
    quant: ModelQuant = None,
    double_quant: ModelDoubleQuant = None,
    as_json: Json = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("MODEL")] = False,
    color: Colored = Color.auto,
) -> None:
    """Show whether MODEL fits --gpus, the best settings that do, what it takes, and where.

    Layers are spread over --gpus in one process. With --ddp or --fsdp there is a process (a rank)
    on each GPU, and the figures are those of one of them.

    Settings that are left out are searched for the best combination that fits; those that are given
    change only where nothing fits with them.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 4 where it does not fit
    the devices of --gpus, and with 2 where MODEL or a setting cannot be read.
    """
    from ..models.files import place_of, refuse_yaml
    from . import render

    refuse_yaml(model, "plan")
    place_of(model)
    with render.working(f"Rehearsing a training step of {model}"):
        from ..models import named
        from ..planning.plan import plan_settings

        source = named.resolve(model, trust_remote_code=trust_remote_code)
        settings = {
            "batch": batch,
            "seq": seq,
            "rank": rank,
            "targets": targets,
            "adapter_dtype": adapter_dtype,
            "optimizer": optimizer,
            "checkpointing": checkpointing,
            "attention": attention,
            "prepared": prepared,
            "offload": offload,
        }
        report = plan_settings(
            source,
            packed_as(source.settings, quant, double_quant),
            {name: value for name, value in settings.items() if value is not None},
            gpus=gpus,
            engine=_engine(ddp, fsdp),
            trust_remote_code=trust_remote_code,
        )
    paste = ["moe-qlora plan", quote(model), *(["--gpus", quote(gpus)] if gpus else [])]
    paste += [f"--quant {quant.value}"] if quant is not None else []
    paste += [f"--{'' if double_quant else 'no-'}double-quant"] * (double_quant is not None)
    show(report, " ".join(paste), as_json=as_json, color=color)


def _engine(ddp: int | None, fsdp: int | None) -> str | None:
    if ddp is not None and fsdp is not None:
        raise ConfigError("--ddp and --fsdp are two engines for one run; give one of them.")
    if ddp is not None:
        return "ddp" if ddp == _ALL else f"ddp:{ddp}"
    return None if fsdp is None else f"fsdp:{fsdp}"


def show(report: MemoryPlan, command: str, *, as_json: bool, color: Color) -> None:
    """Print a plan, with its best settings as options of a command; end with 4 without a fit."""
    from . import render, render_plan

    if as_json:
        render.print_json(report.as_dict())
    else:
        render_plan.show(report, render.console(color.value), command)
    if report.fits is False:
        raise typer.Exit(DOES_NOT_FIT)
