"""Find what `moe-qlora dump` prints: a model's layout, what packing saves, the lists for PEFT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..checkpoint.prequantized import (
    codes_of_source,
    describe_plain,
    described_method,
)
from ..detection.detect import detect
from ..layout import ExpertParam, ModelLayout
from ..models import named
from ..packing.format import packed_nbytes
from ..packing.selection import skipping_pattern
from ..packing.settings import CodecSettings
from .options import Quant, codec_settings


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
    """Everything that `dump` prints of a model.

    The last two are what PEFT must leave alone once experts are packed, and put LoRA on.
    """

    source: named.Source
    layout: ModelLayout
    settings: CodecSettings
    groups: tuple[ParamGroup, ...]
    exclude_modules: tuple[str, ...]
    target_parameters: tuple[str, ...]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of all expert parameters packed."""
        return sum(group.packed_nbytes for group in self.groups)


def inspect_model(
    model: str, quant: Quant | None, double_quant: bool | None, *, trust_remote_code: bool
) -> Findings:
    """Build `model`, as `named.resolve` takes it, on the meta device, and detect its experts."""
    source = named.resolve(model, trust_remote_code=trust_remote_code)
    settings = codec_settings(source.settings, quant, double_quant)
    _, note = codes_of_source(source.config)
    source = replace(source, notes=(*source.notes, note)) if note else source
    if described_method(source.config) is not None:
        describe_plain(source.config)
    built = named.build(source, trust_remote_code=trust_remote_code)
    layout = detect(built)
    groups = _groups(layout, settings)
    packed = [param for group in groups if group.skipped is None for param in group.params]
    targets = tuple(param.name for param in layout.experts if param in packed)
    return Findings(source, layout, settings, groups, exclude_paths(built, packed), targets)


def exclude_paths(model: nn.Module, params: list[ExpertParam]) -> tuple[str, ...]:
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
        inside.append(f"{owner}.parametrizations".lstrip("."))
        lists = [f"{inside[-1]}.{leaf}" for leaf in leaves]
        paths += inside + [path for entry in lists for path in (entry, f"{entry}.0")]
    return tuple(filter(None, paths))


def _groups(layout: ModelLayout, settings: CodecSettings) -> tuple[ParamGroup, ...]:
    alike: dict[tuple[Any, ...], list[ExpertParam]] = {}
    for param in layout.experts:
        skipped = skipping_pattern(param, settings.skip_modules)
        key = (param.pattern, param.shape, param.transposed, param.role, param.dtype_name, skipped)
        alike.setdefault(key, []).append(param)
    groups = []
    for (pattern, *_, skipped), params in alike.items():
        stays = skipped is not None
        sizes = (
            p.nbytes if stays or p.packed else packed_nbytes(p.shape, settings) for p in params
        )
        groups.append(ParamGroup(pattern, tuple(params), sum(sizes), skipped))
    return tuple(groups)
