"""`moe-qlora dump MODEL`: the expert parameters of a model, and what to tell PEFT about them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import Color, Colored, Json, Model, ModelDoubleQuant, ModelQuant, trust_remote_code_of

NO_EXPERTS = 3
EXAMPLES = (
    "moe-qlora dump qwen3-30b-a3b",
    "moe-qlora dump ./model --why",
    "moe-qlora dump ./model --peft > targets.py",
    "moe-qlora dump train.yaml --yaml >> train.yaml",
)


def dump(
    model: Model,
    quant: ModelQuant = None,
    double_quant: ModelDoubleQuant = None,
    as_json: Json = False,
    why: Annotated[
        bool, typer.Option("--why", help="Print the evidence, and what was rejected and why.")
    ] = False,
    peft: Annotated[
        bool, typer.Option("--peft", help="Print Python to paste into a LoraConfig, alone.")
    ] = False,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Print YAML to paste into a trainer's file, alone.")
    ] = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("MODEL")] = False,
    color: Colored = Color.auto,
) -> None:
    """Show every expert parameter of MODEL, its bytes now and packed, and the lists for PEFT.

    Nothing is loaded or downloaded but the configuration. Ends with 0 where experts were found, 3
    where there are none, 2 where MODEL cannot be read.
    """
    from ..errors import ConfigError
    from ..models.files import place_of
    from . import render

    if as_json + peft + yaml > 1:
        raise ConfigError("--json, --peft and --yaml exclude each other; give one of them.")
    place_of(model)
    with render.working(f"Looking for experts in {model}"):
        from . import render_dump
        from .render_dump import inspect_model

        findings = inspect_model(model, quant, double_quant, trust_remote_code=trust_remote_code)
    if as_json:
        render.print_json(render_dump.as_dict(findings))
    elif peft and findings.layout:
        sys.stdout.write(render_dump.as_python(findings))
    elif yaml and findings.layout:
        sys.stdout.write(render_dump.as_yaml(findings))
    else:
        render_dump.show(findings, render.console(color.value), why=why)
    if not findings.layout:
        raise typer.Exit(NO_EXPERTS)
