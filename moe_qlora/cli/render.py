"""How `moe-qlora dump` prints what it found: a table, JSON, Python or YAML."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ..layout import ExpertParam, human_bytes, name_pattern
from .findings import Findings

_PIPE_WIDTH = 160


def console(color: str) -> Console:
    """A console on stdout; into a pipe it is 160 columns wide and plain unless asked otherwise."""
    piped = not sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        width=_PIPE_WIDTH if piped else shutil.get_terminal_size().columns,
        force_terminal={"always": True, "never": False, "auto": None}[color],
        no_color=color == "never",
        highlight=False,
    )


def orientation(param: ExpertParam) -> str:
    """`(E, out, in)`, `(E, in, out)` or `unknown`."""
    return {False: "(E, out, in)", True: "(E, in, out)", None: "unknown"}[param.transposed]


def setting(found: Findings) -> str:
    """The packed type in words: `nf4, double quantization`."""
    return found.kind + (", double quantization" if found.double_quant else "")


def show(found: Findings, out: Console, *, why: bool = False) -> None:
    """Print the table, the totals, the lists for PEFT and the notes; with `why` the evidence."""
    for note in found.source.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    if not found.layout:
        out.print(
            f"{escape(found.source.label)}: no fused expert parameters "
            f"({len(found.layout.rejected)} other parameters of three or more dimensions)."
        )
        _linear_experts(found, out)
        if why:
            _why(found, out)
        return
    out.print(_table(found))
    ratio = found.nbytes / max(found.packed_nbytes, 1)
    out.print(
        f"{len(found.layout)} expert parameters: {human_bytes(found.nbytes)} now, "
        f"{human_bytes(found.packed_nbytes)} packed ({ratio:.2f} times smaller)."
    )
    _linear_experts(found, out)
    plain = [router.name for router in found.layout.routers if router.plain_linear]
    if plain:
        out.print(
            f"[yellow]Routers that are plain Linear layers[/], so that bitsandbytes packs them "
            f"unless llm_int8_skip_modules names them: {escape(_patterns(plain))}"
        )
    rejected = len(found.layout.rejected)
    if rejected:
        out.print(
            f"{rejected} other parameters of three or more dimensions are no experts"
            + ("." if why else " (--why says why).")
        )
    owners = [param.module_name for group in found.groups for param in group.params]
    out.print(
        f"PEFT: {len(found.target_parameters)} target_parameters; {len(found.exclude_modules)} "
        f"exclude_modules, in and below {escape(_patterns(dict.fromkeys(owners)))} "
        "(--peft and --yaml print them)."
    )
    if why:
        _why(found, out)


def as_dict(found: Findings) -> dict[str, Any]:
    """Everything, for `json.dumps`; sizes in bytes."""
    layout = found.layout
    return {
        "model": found.source.label,
        "model_type": found.source.config.model_type,
        "quantization": {"kind": found.kind, "double_quant": found.double_quant},
        "totals": {
            "parameters": len(layout),
            "nbytes": found.nbytes,
            "packed_nbytes": found.packed_nbytes,
        },
        "experts": [
            {
                "pattern": group.pattern,
                "count": len(group.params),
                "shape": list(group.params[0].shape),
                "num_experts": group.params[0].num_experts,
                "in_features": group.params[0].in_features,
                "out_features": group.params[0].out_features,
                "transposed": group.params[0].transposed,
                "role": group.params[0].role,
                "dtype": group.params[0].dtype_name,
                "packed": group.params[0].packed,
                "skipped": group.skipped,
                "nbytes": group.nbytes,
                "packed_nbytes": group.packed_nbytes,
                "names": [param.name for param in group.params],
                "aliases": [alias for param in group.params for alias in param.aliases],
                "evidence": group.params[0].evidence,
                "orientation_evidence": group.params[0].orientation_evidence,
            }
            for group in found.groups
        ],
        "linear_experts": [
            {"name": item.name, "num_experts": item.num_experts, "linear": list(item.linear_names)}
            for item in layout.linear_experts
        ],
        "routers": [
            {
                "name": router.name,
                "num_choices": router.num_choices,
                "plain_linear": router.plain_linear,
            }
            for router in layout.routers
        ],
        "rejected": [
            {"name": item.name, "shape": list(item.shape), "reason": item.reason}
            for item in layout.rejected
        ],
        "exclude_modules": list(found.exclude_modules),
        "target_parameters": list(found.target_parameters),
        "notes": list(found.source.notes),
    }


def as_python(found: Findings) -> str:
    """Keyword arguments of a `LoraConfig`: the lists in full, layers folded into a range."""
    lines = ["# LoraConfig(..., for experts packed by moe_qlora"]
    for name, entries in _lists(found):
        lines += [f"{name}=[", *(f"    {item}," for item in _folded(entries)), "],"]
    return "\n".join(lines) + "\n"


def as_yaml(found: Findings) -> str:
    """The keys that axolotl-style trainers read, every name in full."""
    lines = ["# for experts packed by moe_qlora"]
    for name, entries in _lists(found):
        lines += [f"lora_{name}:", *(f"  - {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"


def _lists(found: Findings) -> list[tuple[str, tuple[str, ...]]]:
    return [
        ("target_parameters", found.target_parameters),
        ("exclude_modules", found.exclude_modules),
    ]


def _folded(names: tuple[str, ...]) -> list[str]:
    """Python expressions for list items that together give exactly `names`, in some order."""
    by_layer: dict[str, list[int]] = {}
    items = []
    for name in names:
        numbers = re.search(r"^(.*?\.)(\d+)(\..*)$", name)
        if numbers is None:
            items.append(repr(name))
        else:
            head, number, tail = numbers.groups()
            by_layer.setdefault(f"{head}{{i}}{tail}", []).append(int(number))
    for template, layers in by_layer.items():
        for first, last in _runs(sorted(layers)):
            if last == first + 1:
                items.append(repr(template.replace("{i}", str(first))))
            else:
                items.append(f'*[f"{template}" for i in range({first}, {last})]')
    return items


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, last + 1)."""
    runs = [(numbers[0], numbers[0] + 1)]
    for number in numbers[1:]:
        first, end = runs[-1]
        if number == end:
            runs[-1] = (first, end + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _table(found: Findings) -> Table:
    table = Table(title=f"{escape(found.source.label)}: experts packed as {setting(found)}")
    for heading in ("parameter", "count", "shape", "layout", "role", "dtype", "now", "packed"):
        right = heading in ("count", "now", "packed")
        table.add_column(
            heading, justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    for group in found.groups:
        param = group.params[0]
        table.add_row(
            escape(group.pattern),
            str(len(group.params)),
            "x".join(map(str, param.shape)),
            orientation(param),
            param.role,
            param.packed or param.dtype_name,
            human_bytes(group.nbytes),
            "skipped" if group.skipped else human_bytes(group.packed_nbytes),
        )
    return table


def _linear_experts(found: Findings, out: Console) -> None:
    names = [item.name for item in found.layout.linear_experts]
    if names:
        out.print(
            f"Experts that are lists of Linear layers, which bitsandbytes packs itself: "
            f"{escape(_patterns(names))}"
        )


def _patterns(names: Any) -> str:
    counts: dict[str, int] = {}
    for name in names:
        pattern = name_pattern(name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "none"


def _why(found: Findings, out: Console) -> None:
    blocks = []
    for group in found.groups:
        param = group.params[0]
        blocks.append(f"[green]{escape(group.pattern)}[/]")
        blocks.append(f"    an expert stack: {escape(param.evidence)}")
        if param.orientation_evidence:
            blocks.append(f"    {orientation(param)}: {escape(param.orientation_evidence)}")
        if group.skipped:
            blocks.append(f"    skipped: llm_int8_skip_modules names {escape(group.skipped)}")
    rejected: dict[tuple[str, tuple[int, ...], str], int] = {}
    for item in found.layout.rejected:
        key = (name_pattern(item.name), item.shape, item.reason)
        rejected[key] = rejected.get(key, 0) + 1
    for (pattern, shape, reason), count in rejected.items():
        blocks.append(f"[red]{escape(pattern)}[/] {'x'.join(map(str, shape))} ({count})")
        blocks.append(f"    no expert stack: {escape(reason)}")
    out.print(Group(*blocks), soft_wrap=True)
