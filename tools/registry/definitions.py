"""Read what transformers' own source says about expert weights, without running any model.

An experts class is one that transformers decorates with `use_experts_implementation`, or one whose
`__init__` makes an `nn.Parameter` of three or more dimensions whose first is written as a number
of experts, or one of the few in `UNUSUAL` whose shape hides what it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DECORATOR = "use_experts_implementation"
DECORATOR_DEFAULTS = {
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
    "is_concatenated": True,
    "is_transposed": False,
}


@dataclass(frozen=True)
class Definition:
    """One experts class, as its source describes it."""

    class_name: str
    weights: tuple[str, ...]  # Parameters that stack expert matrices, in the source's order
    biases: tuple[str, ...]  # Parameters that hold one vector for each expert
    flags: dict[str, bool]  # `DECORATOR_DEFAULTS` as this class sets them
    dispatches: bool  # Whether it goes through transformers' experts interface
    packed_rows: bool  # Whether experts lie one below the other in a 2-D parameter
    roles: dict[str, str]  # Of weights whose names do not tell


# Classes that neither the decorator nor the rule on the first dimension describes in full.
UNUSUAL: dict[str, dict[str, Any]] = {
    # (E * ffn, hidden): `w2` is used as it lies, `w1` and `v1` transposed.
    "DbrxExpertGLU": {
        "weights": ("w1", "v1", "w2"),
        "packed_rows": True,
        "roles": {"w1": "gate", "v1": "up", "w2": "down"},
    },
    # One weight on each module: what it does is told by the name that its owner gives the module.
    "JetMoeParallelExperts": {"weights": ("weight",)},
    # Computes `input @ weight` and says so nowhere.
    "Llama4TextExperts": {"flags": {"is_transposed": True}},
}


def _parameters(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """Yield name and sizes of every `self.<name> = nn.Parameter(torch.<make>(sizes...))`."""
    for item in ast.walk(node):
        if not (isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)):
            continue
        target, call = item.targets[0], item.value
        if not (isinstance(target, ast.Attribute) and ast.unparse(call.func).endswith("Parameter")):
            continue
        constructor = call.args[0] if call.args else None
        if not isinstance(constructor, ast.Call):
            continue
        sizes: list[ast.expr] = list(constructor.args)
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
            sizes = list(sizes[0].elts)
        yield target.attr, [ast.unparse(size) for size in sizes]


def _decorator_flags(node: ast.ClassDef) -> dict[str, bool] | None:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if not ast.unparse(call.func if call else decorator).endswith(DECORATOR):
            continue
        flags = dict(DECORATOR_DEFAULTS)
        for keyword in call.keywords if call else ():
            if keyword.arg in flags:
                flags[keyword.arg] = bool(ast.literal_eval(keyword.value))
        return flags
    return None


def _definition(node: ast.ClassDef) -> Definition | None:
    parameters = list(_parameters(node))
    flags = _decorator_flags(node)
    unusual = UNUSUAL.get(node.name, {})
    weights = [
        name
        for name, sizes in parameters
        if len(sizes) >= 3 and (flags is not None or "experts" in sizes[0])
    ]
    weights = list(unusual.get("weights", weights))
    if not weights:
        return None
    biases = [name for name, sizes in parameters if name not in weights and len(sizes) == 2]
    merged = {**DECORATOR_DEFAULTS, **(flags or {}), **unusual.get("flags", {})}
    if flags is None:
        merged["has_bias"] = bool(biases)
    return Definition(
        class_name=node.name,
        weights=tuple(weights),
        biases=tuple(biases),
        flags=merged,
        dispatches=flags is not None,
        packed_rows=bool(unusual.get("packed_rows", False)),
        roles=dict(unusual.get("roles", {})),
    )


@cache
def definitions(models: Path) -> dict[str, dict[str, Definition]]:
    """Return every experts class under transformers' `models`: module -> class -> definition."""
    by_module: dict[str, dict[str, Definition]] = {}
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "xpert" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and (entry := _definition(node)) is not None:
                module = f"{path.parent.name}.{path.stem}"
                by_module.setdefault(module, {})[node.name] = entry
    return by_module


def definition_of(module: object, models: Path) -> Definition | None:
    """Return the definition of a live module's class, or of the nearest base that has one."""
    known = definitions(models)
    for base in type(module).__mro__:
        folder = ".".join(base.__module__.split(".")[-2:])
        entry = known.get(folder, {}).get(base.__name__)
        if entry is not None:
            return entry
    return None
