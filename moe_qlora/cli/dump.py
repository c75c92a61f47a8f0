"""`moe-qlora dump MODEL`: the expert parameters of a model, and PEFT's settings for them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..layout import ExpertParam, ModelLayout, human_bytes, name_pattern
from . import render
from .options import (
    Color,
    Colored,
    Json,
    Model,
    ModelDoubleQuant,
    ModelQuant,
    Quant,
    codec_settings,
    trust_remote_code_of,
)
from .render import say

if TYPE_CHECKING:
    from ..models import named
    from ..packing.settings import CodecSettings

NO_EXPERTS = 3
_LISTS = ("target_parameters", "exclude_modules")
_PLAIN = re.compile(r"[\w.]+")  # names that need no quotes in YAML and f-strings
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

    if as_json + peft + yaml > 1:
        raise ConfigError("--json, --peft and --yaml exclude each other; give one of them.")
    place_of(model)
    with render.working(f"Looking for experts in {model}"):
        findings = inspect_model(model, quant, double_quant, trust_remote_code=trust_remote_code)
    if as_json:
        render.print_json(_as_dict(findings))
    elif peft and findings.layout:
        sys.stdout.write(_as_python(findings))
    elif yaml and findings.layout:
        sys.stdout.write(_as_yaml(findings))
    else:
        _show(findings, render.console(color.value), why=why)
    if not findings.layout:
        raise typer.Exit(NO_EXPERTS)


def _orientation(param: ExpertParam) -> str:
    return {False: "(E, out, in)", True: "(E, in, out)", None: "unknown"}[param.transposed]


def _show(findings: Findings, out: Console, *, why: bool = False) -> None:
    for note in findings.source.notes:
        say(out, f"[yellow]note:[/] {escape(note)}")
    if not findings.layout:
        say(
            out,
            f"{escape(findings.source.label)}: no fused expert parameters "
            f"({len(findings.layout.rejected)} other parameters of three or more dimensions).",
        )
        _linear_experts(findings, out)
        if why:
            _why(findings, out)
        return
    if findings.source.notes:
        out.line()
    _show_table(findings, out)
    nbytes = findings.layout.nbytes
    packed_nbytes = sum(group.packed_nbytes for group in findings.groups)
    say(
        out,
        f"{len(findings.layout)} expert parameters: {human_bytes(nbytes)} now, "
        f"{human_bytes(packed_nbytes)} packed "
        f"({nbytes / max(packed_nbytes, 1):.2f} times smaller).",
    )
    _linear_experts(findings, out)
    plain = [router.name for router in findings.layout.routers if router.plain_linear]
    if plain:
        say(
            out,
            f"[yellow]Routers that are plain Linear layers[/], so that bitsandbytes packs them "
            f"unless llm_int8_skip_modules names them: {escape(_patterns(plain))}",
        )
    if rejected := len(findings.layout.rejected):
        others = "parameter" if rejected == 1 else "parameters"
        more = "." if why else " (--why says why)."
        say(out, f"No experts: {rejected} other {others} of three or more dimensions{more}")
    modules = escape(_patterns(dict.fromkeys(param.module_name for param in findings.layout)))
    say(
        out,
        f"PEFT: {len(findings.target_parameters)} target_parameters; "
        f"{len(findings.exclude_modules)} exclude_modules, in and below {modules} "
        "(--peft and --yaml print them).",
    )
    if why:
        _why(findings, out)


def _as_dict(findings: Findings) -> dict[str, Any]:
    layout, settings = findings.layout, findings.settings
    return {
        "model": findings.source.label,
        "model_type": findings.source.config.model_type,
        "quantization": {"kind": settings.kind, "double_quant": settings.double_quant},
        "totals": {
            "parameters": len(layout),
            "nbytes": layout.nbytes,
            "packed_nbytes": sum(group.packed_nbytes for group in findings.groups),
        },
        "experts": [_group_as_dict(group) for group in findings.groups],
        "linear_experts": [
            {"name": item.name, "num_experts": item.num_experts, "linear": list(item.linear_names)}
            for item in layout.linear_experts
        ],
        "routers": [asdict(router) for router in layout.routers],
        "rejected": [
            {"name": item.name, "shape": list(item.shape), "reason": item.reason}
            for item in layout.rejected
        ],
        "exclude_modules": findings.exclude_modules,
        "target_parameters": findings.target_parameters,
        "notes": list(findings.source.notes),
    }


def _group_as_dict(group: ParamGroup) -> dict[str, Any]:
    first = group.params[0]
    return {
        "pattern": group.pattern,
        "count": len(group.params),
        "shape": list(first.shape),
        "num_experts": first.num_experts,
        "in_features": first.in_features,
        "out_features": first.out_features,
        "transposed": first.transposed,
        "role": first.role,
        "dtype": first.dtype_name,
        "packed": first.packed,
        "skipped": group.skipped,
        "nbytes": group.nbytes,
        "packed_nbytes": group.packed_nbytes,
        "names": [param.name for param in group.params],
        "aliases": [alias for param in group.params for alias in param.aliases],
        "evidence": first.evidence,
        "orientation_evidence": first.orientation_evidence,
    }


def _as_python(findings: Findings) -> str:
    """Return keyword arguments of a `LoraConfig`, with runs of layers folded into ranges."""
    lines = ["# LoraConfig(..., for experts packed by moe_qlora"]
    for name in _LISTS:
        items = _folded(getattr(findings, name))
        lines += [f"{name}=[", *(f"    {item}," for item in items), "],"]
    return "\n".join(lines) + "\n"


def _as_yaml(findings: Findings) -> str:
    lines = ["# for experts packed by moe_qlora"]
    for name in _LISTS:
        entries = getattr(findings, name)
        quoted = (one if _PLAIN.fullmatch(one) else json.dumps(one) for one in entries)
        lines += [f"lora_{name}:", *(f"  - {entry}" for entry in quoted)]
    return "\n".join(lines) + "\n"


def _folded(names: Iterable[str]) -> list[str]:
    """Return Python list items that together give exactly `names`, in any order."""
    by_layer: dict[str, list[int]] = {}
    items = []
    for name in names:
        parts = re.search(r"^(.*?\.)(\d+)(\..*)$", name)
        if parts is None or not _PLAIN.fullmatch(name):
            items.append(repr(name))
        else:
            head, number, tail = parts.groups()
            by_layer.setdefault(f"{head}{{i}}{tail}", []).append(int(number))
    for template, layers in by_layer.items():
        # Consecutive layers have equal differences to their places.
        for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
            numbers = [layer for _, layer in run]
            if len(numbers) == 1:
                items.append(repr(template.replace("{i}", str(numbers[0]))))
            else:
                items.append(f'*[f"{template}" for i in range({numbers[0]}, {numbers[-1] + 1})]')
    return items


def _show_table(findings: Findings, out: Console) -> None:
    settings = findings.settings
    nested = ", double quantization" if settings.double_quant else ""
    label = escape(findings.source.label)
    title = f"{label}: experts packed as {settings.kind}{nested}"
    rows = []
    for group in findings.groups:
        param = group.params[0]
        rows.append(
            (
                escape(group.pattern),
                str(len(group.params)),
                f"{'x'.join(map(str, param.shape))} {param.packed or param.dtype_name}",
                f"{param.role} {_orientation(param)}",
                human_bytes(group.nbytes),
                "skipped" if group.skipped else human_bytes(group.packed_nbytes),
            )
        )
    headings = ("parameter", ">count", "shape, dtype", "role, layout", ">now", ">packed")
    render.show_table(out, title, headings, rows)


def _linear_experts(findings: Findings, out: Console) -> None:
    names = [item.name for item in findings.layout.linear_experts]
    if names:
        say(
            out,
            f"Experts that are lists of Linear layers, which bitsandbytes packs itself: "
            f"{escape(_patterns(names))}",
        )


def _patterns(names: Iterable[str]) -> str:
    """Return the names with `*` for numbers, and their counts."""
    counts = Counter(name_pattern(name) for name in names)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "none"


def _why(findings: Findings, out: Console) -> None:
    blocks = []
    for group in findings.groups:
        param = group.params[0]
        blocks.append(f"[green]{escape(group.pattern)}[/]")
        blocks.append(f"    an expert weight: {escape(param.evidence)}")
        if param.orientation_evidence:
            blocks.append(f"    {_orientation(param)}: {escape(param.orientation_evidence)}")
        if group.skipped:
            blocks.append(f"    skipped: llm_int8_skip_modules names {escape(group.skipped)}")
    rejected = Counter(
        (name_pattern(item.name), item.shape, item.reason) for item in findings.layout.rejected
    )
    for (pattern, shape, reason), count in rejected.items():
        blocks.append(f"[red]{escape(pattern)}[/] {'x'.join(map(str, shape))} ({count})")
        blocks.append(f"    no expert weight: {escape(reason)}")
    out.line()
    for block in blocks:
        say(out, block, indent=6 if block.startswith(" ") else 2)


@dataclass(frozen=True)
class ParamGroup:
    """Expert parameters that differ only in their layer, `*` in `pattern`.

    `nbytes` and `packed_nbytes` are sums, statistics included. `skipped` is the entry of
    llm_int8_skip_modules that leaves the parameters unpacked; then both sums are equal.
    """

    pattern: str
    params: tuple[ExpertParam, ...]
    nbytes: int
    packed_nbytes: int
    skipped: str | None


@dataclass(frozen=True)
class Findings:
    """Everything that `dump` prints of a model; the last two are for PEFT after packing."""

    source: named.Source
    layout: ModelLayout
    settings: CodecSettings
    groups: tuple[ParamGroup, ...]
    exclude_modules: list[str]
    target_parameters: list[str]


def inspect_model(
    model: str, quant: Quant | None, double_quant: bool | None, *, trust_remote_code: bool
) -> Findings:
    """Build `model`, as `named.resolve` takes it, on meta, detect its experts and pack blanks."""
    from ..checkpoint.prequantized import codes_of_source, describe_plain, maker_method
    from ..detection.detect import detect
    from ..lora.targets import exclude_modules, target_parameters
    from ..models import named
    from ..packing.parametrize import pack_blank

    source = named.resolve(model, trust_remote_code=trust_remote_code)
    settings = codec_settings(source.settings, quant, double_quant)
    _, note = codes_of_source(source.config)
    source = replace(source, notes=(*source.notes, note)) if note else source
    if maker_method(source.config) is not None:
        describe_plain(source.config)
    built = named.build(source, trust_remote_code=trust_remote_code)
    layout = detect(built)
    groups = _groups(layout, settings)
    packed = [param for group in groups if group.skipped is None for param in group.params]
    for param in packed:
        pack_blank(built, param, settings)
    excluded, targets = exclude_modules(built), target_parameters(built, unpacked_ok=True)
    return Findings(source, layout, settings, groups, excluded, targets)


def _groups(layout: ModelLayout, settings: CodecSettings) -> tuple[ParamGroup, ...]:
    from ..packing.selection import skipping_pattern
    from ..packing.settings import packed_nbytes

    alike: dict[tuple[Any, ...], list[ExpertParam]] = {}
    for param in layout.experts:
        skipped = skipping_pattern(param, settings.skip_modules)
        key = (param.pattern, param.shape, param.transposed, param.role, param.dtype_name, skipped)
        alike.setdefault(key, []).append(param)
    groups = []
    for (pattern, *_, skipped), params in alike.items():
        now = sum(param.nbytes for param in params)
        then = now if skipped else sum(packed_nbytes(p.shape, settings) for p in params)
        groups.append(ParamGroup(pattern, tuple(params), now, then, skipped))
    return tuple(groups)
