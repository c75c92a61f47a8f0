"""`moe-qlora dump MODEL`: the expert parameters of a model, and PEFT's settings for them."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from ..errors import ConfigError, visible
from ..layout import human_bytes
from . import options as opt
from . import render

NO_EXPERTS = 3
EXAMPLES = (
    "moe-qlora dump qwen3-30b-a3b",
    "moe-qlora dump ./model --why",
    "moe-qlora dump ./model --peft > targets.py",
    "moe-qlora dump ./model --yaml >> train.yaml",
)
_FIELDS = ("num_experts", "in_features", "out_features", "transposed", "role", "packed", "evidence")
_LISTS = ("target_parameters", "exclude_modules")
_LAYOUTS = {False: "(E, out, in)", True: "(E, in, out)", None: "unknown"}  # by `transposed`


def dump(
    model: opt.Model,
    quant: opt.ModelQuant = None,
    double_quant: opt.ModelDoubleQuant = None,
    as_json: opt.Json = False,
    why: bool = opt.flag("--why", "Print the evidence, and what was rejected and why."),
    peft: bool = opt.flag("--peft", "Print Python to paste into a LoraConfig, alone: full names."),
    yaml: bool = opt.flag("--yaml", "Print YAML to paste into a trainer's file, alone: suffixes."),
    trust_remote_code: opt.Remote = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Show every expert parameter of MODEL, its bytes now and packed, and the lists for PEFT.

    Nothing is loaded or downloaded but the configuration. Ends with 0 where experts were found, 3
    where there are none, 2 where MODEL cannot be read.
    """
    if as_json + peft + yaml > 1:
        raise ConfigError("--json, --peft and --yaml exclude each other; give one of them.")
    with render.working(f"Looking for experts in {model}"):
        found = inspect_model(model, quant, double_quant, trust_remote_code)
    if as_json:
        render.print_json(found)
    elif (peft or yaml) and found["experts"]:
        sys.stdout.write(_to_paste(found, yaml))
    else:
        _show(found, render.console(color.value), why)
    if not found["experts"]:
        raise typer.Exit(NO_EXPERTS)


def inspect_model(
    model: str, quant: opt.Quant | None, double_quant: bool | None, trust_remote_code: bool
) -> dict[str, Any]:
    """Build MODEL on meta, detect its experts and pack blanks; return the document of `--json`."""
    from ..checkpoint.prequantized import codes_of_source, describe_plain, maker_method
    from ..detection.detect import detect
    from ..lora.targets import exclude_modules
    from ..models import named
    from ..packing.parametrize import pack_blank
    from ..packing.selection import skipping_pattern
    from ..packing.settings import packed_nbytes

    source = named.resolve(model, trust_remote_code=trust_remote_code)
    settings = opt.codec_settings(source.settings, quant, double_quant)
    _, note = codes_of_source(source.config)
    if maker_method(source.config) is not None:
        describe_plain(source.config)  # or refuse it
    built = named.build(source, trust_remote_code=trust_remote_code)
    layout = detect(built)
    targets: list[str] = []  # nothing is tied on meta: moe_qlora.target_parameters lists aliases
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for param in layout.experts:
        skipped = skipping_pattern(param, settings.skip_modules)
        key = (param.pattern, param.shape, param.transposed, param.role, param.dtype_name, skipped)
        alike.setdefault(key, []).append(param)
        if skipped is None:
            targets.append(param.name)
            pack_blank(built, param, settings)
    experts = []
    for (*_, skipped), params in alike.items():
        first, nbytes = params[0], sum(param.nbytes for param in params)
        packed = nbytes if skipped else sum(packed_nbytes(p.shape, settings) for p in params)
        experts.append(
            {
                "pattern": first.pattern,
                **{name: getattr(first, name) for name in _FIELDS},
                "orientation_evidence": first.orientation_evidence,
                "count": len(params),
                "shape": list(first.shape),
                "dtype": first.dtype_name,
                "skipped": skipped,
                "nbytes": nbytes,
                "packed_nbytes": packed,
                "names": [param.name for param in params],
                "aliases": [alias for param in params for alias in param.aliases],
            }
        )
    return {
        "model": source.label,
        "model_type": source.config.model_type,
        "quantization": {"kind": settings.kind, "double_quant": settings.double_quant},
        "totals": {
            "parameters": len(layout),
            "nbytes": layout.nbytes,
            "packed_nbytes": sum(group["packed_nbytes"] for group in experts),
        },
        "experts": experts,
        "linear_experts": [
            {"name": item.name, "num_experts": item.num_experts, "linear": list(item.linear_names)}
            for item in layout.linear_experts
        ],
        "routers": [asdict(router) for router in layout.routers],
        "rejected": [asdict(item) for item in layout.rejected],
        "exclude_modules": exclude_modules(built),
        "target_parameters": targets,
        "notes": [*source.notes, *([note] if note else [])],
    }


def _show(found: Mapping[str, Any], out: Console, why: bool) -> None:
    experts, rejected = found["experts"], len(found["rejected"])
    others = f"{rejected} other parameter{'s' * (rejected != 1)} of three or more dimensions"
    if experts:
        kind, nested = found["quantization"].values()
        count, now, packed = found["totals"].values()
        sizes = f"{human_bytes(now)} now, {human_bytes(packed)} packed as {kind}"
        smaller = f"({now / max(packed, 1):.2f} times smaller)"
        how = f"{sizes}{' with double quantization' * nested} {smaller}"
        render.say(out, f"{found['model']}: {count} expert parameters, {how}.")
        for one in experts:  # a name has a line of its own, which no table breaks
            out.print(visible(f"  {one['pattern']}"), markup=False, soft_wrap=True)
            size = f"{one['count']} of {_size(one)} {one['packed'] or one['dtype']}"
            packed = "skipped" if one["skipped"] else f"{human_bytes(one['packed_nbytes'])} packed"
            layout = f"{one['role']} {_LAYOUTS[one['transposed']]}"
            render.say(out, f"    {size}, {layout}; {human_bytes(one['nbytes'])} now, {packed}")
        homes = dict.fromkeys(n.rpartition(".")[0] for one in experts for n in one["names"])
        targets, excluded = (len(found[name]) for name in _LISTS)
        lists = f"{targets} target_parameters; {excluded} exclude_modules, in and below"
        render.say(out, f"PEFT: {lists} {render.patterns(homes)} (--peft and --yaml print them).")
        if rejected:
            render.say(out, f"No experts: {others}{'' if why else ' (--why says why)'}.")
    else:
        render.say(out, f"{found['model']}: no fused expert parameters ({others}).")
    if names := [item["name"] for item in found["linear_experts"]]:
        lists = "Experts that are lists of Linear layers, which bitsandbytes packs itself"
        render.say(out, f"{lists}: {render.patterns(names)}")
    for one in experts if why else ():
        said = f"{one['evidence']}. {one['orientation_evidence']}".rstrip()
        said += f" Skipped by {one['skipped']!r}." if one["skipped"] else ""
        render.say(out, f"{one['pattern']}: {said}", "green")
    for one in found["rejected"] if why else ():
        render.say(out, f"{one['name']}: {_size(one)}, {one['reason']}", "red")
    if plain := [router["name"] for router in found["routers"] if router["plain_linear"]]:
        said = "bitsandbytes packs these routers unless llm_int8_skip_modules names them"
        render.say(out, f"note: {said}: {render.patterns(plain)}")
    for note in found["notes"]:
        render.say(out, f"note: {note}")


def _size(one: Mapping[str, Any]) -> str:
    return "x".join(map(str, one["shape"]))


def _to_paste(found: Mapping[str, Any], yaml: bool) -> str:
    others = [item["name"] for item in found["rejected"]]
    others += [name for one in found["experts"] if one["skipped"] for name in one["names"]]
    lines = ["# for experts packed by moe_qlora"]
    for name in _LISTS:
        # json.dumps quotes for both languages
        if yaml:
            # without their layer and all before it; full names if others end alike
            short = list(dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", each) for each in found[name]))
            unique = not any(f".{each}." in f".{other}." for each in short for other in others)
            lines.append(f"lora_{name}:")
            lines += [f"  - {json.dumps(each)}" for each in (short if unique else found[name])]
        else:
            lines += [f"{name}=[", *(f"    {json.dumps(each)}," for each in found[name]), "],"]
    return "\n".join(lines) + "\n"
