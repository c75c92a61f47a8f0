"""`moe-qlora doctor [MODEL]`: versions, devices, backends of expert layers, known problems."""

import typer

from . import options as opt
from . import render

HAS_PROBLEMS = 1
EXAMPLES = (
    "moe-qlora doctor",
    "moe-qlora doctor gpt-oss-20b --gpu 4090",
    "moe-qlora doctor ./model --json",
)


def doctor(
    model: opt.OptionalModel = None,
    gpu: str | None = opt.option("A card to answer for, such as 4090; default: what is here."),
    rank: int | None = opt.option("LoRA rank on the experts; default: 16."),
    quant: opt.ModelQuant = None,
    double_quant: opt.ModelDoubleQuant = None,
    as_json: opt.Json = False,
    trust_remote_code: opt.Remote = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Examine versions and devices and, given MODEL, how each of its expert layers is computed.

    Says for each kind of layer which backend computes it and why, and what a fallback costs; and
    which of the installed versions are known not to work together, with what to do.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 1 where a problem was
    found (a warning is none), and with 2 where MODEL or a setting cannot be read.
    """
    with render.working(f"Examining {model or 'this environment'}"):
        from ..diagnosis.doctor import doctor as examine
        from ..models import named

        source = settings = None
        if model is not None:
            source = named.resolve(model, trust_remote_code=trust_remote_code)
            settings = opt.packed_as(source.settings, quant, double_quant)
        diagnosis = examine(
            source, settings, gpu=gpu, rank=rank, trust_remote_code=trust_remote_code
        )
    if as_json:
        render.print_json(diagnosis.as_dict())
    else:
        for line in str(diagnosis).splitlines():
            render.say(render.console(color.value), line)
    if not diagnosis.good:
        raise typer.Exit(HAS_PROBLEMS)
