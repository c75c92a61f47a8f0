"""Find what `moe-qlora dump` prints: a model's layout, what packing saves, the lists for PEFT."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .. import build as source
from ..detection.detect import detect
from ..layout import ExpertParam, ModelLayout
from ..packing.format import packed_nbytes
from ..packing.selection import skipping_pattern
from ..packing.settings import CodecSettings


@dataclass(frozen=True)
class ParamGroup:
    """Expert parameters that differ in nothing but their layer, which `pattern` has as `*`.

    `packed_nbytes` includes statistics, and is the bytes now where `skipped`, an entry of
    llm_int8_skip_modules, leaves the parameters as they are.
    """

    pattern: str
    params: tuple[ExpertParam, ...]
    packed_nbytes: int
    skipped: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them now."""
        return sum(param.nbytes for param in self.params)


@dataclass(frozen=True)
class Findings:
    """Everything that `dump` prints of a model, packed as `kind`: "nf4", "fp4" or "int8".

    The last two are what PEFT must leave alone once experts are packed, and put LoRA on.
    """

    source: source.Source
    layout: ModelLayout
    kind: str
    double_quant: bool
    groups: tuple[ParamGroup, ...]
    exclude_modules: tuple[str, ...]
    target_parameters: tuple[str, ...]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of all expert parameters packed."""
        return sum(group.packed_nbytes for group in self.groups)


def inspect_model(
    model: str, *, kind: str | None, double_quant: bool | None, trust_remote_code: bool
) -> Findings:
    """Build `model`, as `build.resolve` takes it, on the meta device, and detect its experts.

    Where `kind` or `double_quant` is None, its file or the trainer's decides, else nf4 and True.
    """
    named = source.resolve(model, trust_remote_code=trust_remote_code)
    settings = named.settings or CodecSettings("nf4", double_quant=True)
    kind = kind or settings.kind
    double = settings.double_quant if double_quant is None else double_quant
    codec = CodecSettings(kind, double)
    built = source.build(named, trust_remote_code=trust_remote_code)
    layout = detect(built)
    groups = _groups(layout, codec, settings.skip_modules)
    packed = [param for group in groups if group.skipped is None for param in group.params]
    return Findings(
        named,
        layout,
        codec.kind,
        codec.double_quant,
        groups,
        tuple(exclude_paths(built, packed)),
        tuple(param.name for param in layout.experts if param in packed),
    )


def exclude_paths(model: nn.Module, params: list[ExpertParam]) -> list[str]:
    """Return what `moe_qlora.exclude_modules` will give for `model` once `params` are packed.

    For each module that owns one of them: its own path, that of each module inside it, and those
    that the bitsandbytes parametrization will add.
    """
    owned: dict[str, list[str]] = {}
    for param in params:
        for name in param.names:
            owner, _, leaf = name.rpartition(".")
            owned.setdefault(owner, []).append(leaf)
    paths = []
    for owner, leaves in owned.items():
        inside = [path for path, _ in model.get_submodule(owner).named_modules(prefix=owner)]
        root = f"{owner}." if owner else ""
        lists = [f"{root}parametrizations.{leaf}" for leaf in leaves]
        inside.append(f"{root}parametrizations")
        inside += [path for entry in lists for path in (entry, f"{entry}.0")]
        paths += [path for path in inside if path]
    return paths


def _groups(
    layout: ModelLayout, settings: CodecSettings, skip: tuple[str, ...]
) -> tuple[ParamGroup, ...]:
    alike: dict[tuple[object, ...], tuple[str | None, list[ExpertParam]]] = {}
    for param in layout.experts:
        skipped = skipping_pattern(param, skip)
        key = (param.pattern, param.shape, param.transposed, param.role, param.dtype_name, skipped)
        alike.setdefault(key, (skipped, []))[1].append(param)
    groups = []
    for skipped, params in alike.values():
        sizes = (
            param.nbytes
            if skipped is not None or param.packed
            else packed_nbytes(param.shape, settings)
            for param in params
        )
        groups.append(ParamGroup(params[0].pattern, tuple(params), sum(sizes), skipped))
    return tuple(groups)
