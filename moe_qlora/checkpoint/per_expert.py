"""Convert adapters with LoRA on each single expert to LoRA on fused expert weights.

In transformers v4, Tinker, vLLM and SGLang, experts are Linear layers, or one tensor for each
projection. `fused` converts such an adapter to PEFT's layout for the fused weights of a model:

    <path>.experts.<e>.<leaf>.lora_A.weight, .lora_B.weight    (r, in), (out, r)
    <path>.experts.<leaf>.lora_A.weight, .lora_B.weight        (E or 1, r, in), (E or 1, out, r)

If gate and up of an expert have equal A, bit for bit, the fused pair shares it and keeps the rank;
otherwise the ranks add up, and each B is padded with zeros. The products B A do not change.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..detection.detect import detect
from ..errors import AdapterError, CheckpointError
from ..layout import ExpertParam, unwrapped_name
from ..models.files import MAX_CONFIG, read_json, read_raw
from .adapter import (
    CONFIG,
    LAYERS,
    PAIR,
    PREFIX,
    ROLE_OF_LEAF,
    SINGLE_EXPERT,
    WEIGHTS,
    LoraSettings,
    single_experts,
)
from .reader import Checkpoint, inside, parse_fields
from .staging import WRITE_ERRORS, not_written
from .training_codec import NOTE


@dataclass
class Factors:
    """LoRA of one projection of all experts: A `(E, r, in)`, B `(E, out, r)` and their scaling."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[1]


@contextmanager
def fused(folder: Path, model: nn.Module) -> Iterator[Path]:
    """Yield an adapter folder with LoRA on the model's fused expert weights.

    It is the folder itself if no key names a single expert or the model has no fused expert
    weights; otherwise a temporary one.

    Raises:
        AdapterError: Experts are missing in the file, differ in rank, have factors that do not fit
            each other, or belong to no module of the model.
    """
    source = folder / WEIGHTS
    modules: dict[str, dict[str, ExpertParam]] = {}
    for param in detect(model):
        roles = modules.setdefault(unwrapped_name(param.module_name), {})
        roles[param.role] = param
    modules = {name: roles for name, roles in modules.items() if "down" in roles}
    if not modules or not source.is_file():
        yield folder
        return
    with Checkpoint([inside(folder, WEIGHTS)]) as file:
        if not any(single_experts(file)):
            yield folder
            return
        config = read_json(inside(folder, CONFIG))
        settings = parse_fields(LoraSettings, config, folder / CONFIG)
        written = _Fusion(folder, file, settings, model, modules).write(config)
    with ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="moe_qlora-")
            work = Path(stack.enter_context(temporary))
            if (folder / NOTE).is_file():
                (work / NOTE).write_bytes(read_raw(inside(folder, NOTE), MAX_CONFIG))
            save_file(written, work / WEIGHTS, metadata={"format": "pt"})
            (work / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        except WRITE_ERRORS as error:
            instead = "let TMPDIR name another folder"
            place = f"The folder of temporary files, {tempfile.tempdir or 'TMPDIR'},"
            raise CheckpointError(not_written(place, error, instead)) from error
        yield work


def interleaved(module: Any) -> bool:
    """True if rows of gate and up alternate in a fused weight; else gate is the first half."""
    gate = getattr(module, "_apply_gate", None)
    if gate is None:
        return False
    with torch.no_grad():
        probe = torch.linspace(0.5, 1.5, 8).unsqueeze(0)
        moved = probe.clone()
        moved[0, 1] += 0.25
        changed = gate(probe.clone()) != gate(moved)
    return bool(changed[0, 0])


def joined(gate: Tensor, up: Tensor, alternate: bool) -> Tensor:
    """Join B of gate and up, `(E, I, r)` each, to that of the fused weight `(E, 2 I, r)`."""
    return torch.stack((gate, up), 2).flatten(1, 2) if alternate else torch.cat((gate, up), 1)


def halves(fused: Tensor, alternate: bool) -> tuple[Tensor, Tensor]:
    """Undo `joined`."""
    if alternate:
        return fused[:, ::2], fused[:, 1::2]
    gate, up = fused.chunk(2, dim=1)
    return gate, up


def flat_factors(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return PEFT's `(E r, in)` and `(out, r E)`."""
    b = factors.b.permute(1, 2, 0).flatten(1)
    return factors.a.flatten(0, 1).contiguous(), b.contiguous()


def alpha_of(scaling: float, rank: int) -> float:
    """Return the `lora_alpha` for which `lora_alpha / rank` equals the scaling, bit for bit."""
    alpha = scaling * rank
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    alpha = next((one for one in near if one / rank == scaling), alpha)
    return int(alpha) if alpha.is_integer() else alpha


@dataclass
class _Fusion:
    folder: Path
    file: Checkpoint
    settings: LoraSettings
    model: nn.Module
    modules: Mapping[str, Mapping[str, ExpertParam]]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # by the full name of the adapted module or parameter
    ranks: dict[str, int] = field(default_factory=dict)
    scalings: dict[str, float] = field(default_factory=dict)

    def write(self, config: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of the fused adapter; change the given config to the fused one."""
        keys: dict[str, dict[str, dict[tuple[int | None, str], str]]] = {}
        others: list[str] = []
        for key in self.file:
            match = SINGLE_EXPERT.match(key.removeprefix(PREFIX))
            if not match or match["leaf"] not in ROLE_OF_LEAF:
                others.append(key)
                continue
            expert = None if match["expert"] is None else int(match["expert"])
            leaves = keys.setdefault(self._module(match["path"]), {})
            leaves.setdefault(match["leaf"], {})[expert, match["half"]] = key
        for module, leaves in keys.items():
            roles = {ROLE_OF_LEAF[leaf]: self._stacked(leaves[leaf]) for leaf in leaves}
            pairs: list[tuple[ExpertParam, Factors]] = []
            for param in self.modules[module].values():
                parts = ("gate", "up") if param.role == "gate_up" else (param.role,)
                given = {role: roles[role] for role in parts if role in roles}
                for role, factors in given.items():
                    out = param.out_features
                    if role != param.role and out is not None:
                        out //= 2  # gate and up are halves of one weight
                    seen = (factors.a.shape[0], factors.b.shape[1], factors.a.shape[2])
                    if seen != (wanted := (param.num_experts, out, param.in_features)):
                        raise AdapterError(
                            f"{self.folder} has LoRA for the {role} projection of "
                            f"{module}.{param.parameter_name} in the shape {seen} (experts, out, "
                            f"in), and the model's is {wanted}: use it with the model that it was "
                            "trained on."
                        )
                if given and param.role == "gate_up":
                    alternate = interleaved(self.model.get_submodule(param.module_name))
                    pairs.append((param, _fuse(given.get("gate"), given.get("up"), alternate)))
                elif given:
                    pairs.append((param, given[param.role]))
            for depth, (param, factors) in enumerate(reversed(pairs)):
                name = f"{module}.{param.parameter_name}"
                self.ranks[name], self.scalings[name] = factors.rank, factors.scaling
                path = PREFIX + module + ".base_layer" * depth
                a, b = flat_factors(factors)
                self.tensors[f"{path}.lora_A.weight"], self.tensors[f"{path}.lora_B.weight"] = a, b
        parameters = set(self.ranks)
        # The model may have adapters already: their innermost modules come last and win
        inner = {unwrapped_name(name): one for name, one in self.model.named_modules()}
        own = {unwrapped_name(name) for name in self.model.state_dict()}
        mapping: list[Any] = list(get_model_conversion_mapping(self.model))
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        prefix = getattr(self.model, "base_model_prefix", "")
        modules: set[str] = set()
        for key in others:
            match = PAIR.match(key.removeprefix(PREFIX))
            if match is None:
                self.tensors[key] = self.file.read(key)
                continue
            path = match["path"]
            renamed, _ = rename_source_key(
                f"{path}.weight", renamings, converters, prefix, dict.fromkeys(own)
            )
            known = renamed.removesuffix(".weight") if renamed in own else path
            rank, scaling = self.settings.rank_and_scaling(path)
            owner = inner.get(known)
            bare = owner is not None and not isinstance(owner, LAYERS)
            name = f"{known}.weight" if bare else known
            (parameters if bare else modules).add(name)
            self.ranks[name], self.scalings[name] = rank, scaling
            end = key.removeprefix(PREFIX)[len(path) :]
            self.tensors[PREFIX + known + end] = self.file.read(key)
        rank, alpha = uniform(self.ranks, self.scalings)
        config.update(r=rank, lora_alpha=alpha, use_rslora=False)
        config["rank_pattern"] = {
            re.escape(name): one for name, one in self.ranks.items() if one != rank
        }
        config["alpha_pattern"] = {
            re.escape(name): alpha_of(scaling, self.ranks[name])
            for name, scaling in self.scalings.items()
            if (scaling, self.ranks[name]) != (alpha / rank, rank)
        }
        config["target_modules"] = sorted(modules) or None
        config["target_parameters"] = sorted(parameters)
        return self.tensors

    def _module(self, path: str) -> str:
        if path in self.modules:
            return path
        # the only one with the same numbers
        numbers, *all_numbers = (
            re.findall(r"\.(\d+)(?=\.)", f".{name}.") for name in (path, *self.modules)
        )
        same = [n for n, own in zip(self.modules, all_numbers, strict=True) if own == numbers]
        if len(same) != 1:
            raise AdapterError(
                f"{self.folder} has LoRA for the experts of {path}, which this model does not have "
                f"({next(iter(self.modules))} is one that it has); use it with the model that it "
                "was trained on."
            )
        return same[0]

    def _stacked(self, keys: Mapping[tuple[int | None, str], str]) -> Factors:
        """Return the factors of one projection of all experts."""
        first = next(iter(keys.values()))
        read = {place: self.file.read(key) for place, key in keys.items()}
        single = (None, "A") not in read
        experts: list[int | None] = [*range(len(read) // 2)] if single else [None]
        fits = read.keys() == {(expert, half) for expert in experts for half in "AB"}
        pairs = [(read[one, "A"], read[one, "B"]) for one in experts] if fits else []
        for a, b in pairs:  # (r, in), (out, r); of all experts in one tensor, E or 1 before both
            fits = fits and a.dim() == b.dim() == (2 if single else 3)
            fits = fits and a.shape[-2] == b.shape[-1] > 0
            fits = fits and (a.shape, b.shape) == (pairs[0][0].shape, pairs[0][1].shape)
            fits = fits and (single or len({len(a), len(b), 1}) < 3)
        if not fits:
            raise AdapterError(
                f"{self.folder}: {first} is of LoRA for some experts only, or not of one pair of "
                f"factors of one shape for each ({len(read)} tensors), which one fused weight "
                "cannot hold: merge it instead."
            )
        paths = (keys[one, "A"].removeprefix(PREFIX).rpartition(".lora_")[0] for one in experts)
        scalings = [self.settings.rank_and_scaling(path)[1] for path in paths]
        if not single:
            a, b = pairs[0]
            count = max(len(a), len(b))  # 1: factors that experts share
            return Factors(a.expand(count, -1, -1), b.expand(count, -1, -1), scalings[0])
        parts = [b for _, b in pairs]
        if len(set(scalings)) > 1:
            ratios = [one / scalings[0] for one in scalings]
            parts = [part.float() * ratio for part, ratio in zip(parts, ratios, strict=True)]
        return Factors(torch.stack([a for a, _ in pairs]), torch.stack(parts), scalings[0])


def uniform(ranks: Mapping[str, int], scalings: Mapping[str, float]) -> tuple[int, float]:
    """Return the commonest rank and the `lora_alpha` of its commonest scaling."""
    pairs = [(ranks[name], scalings[name]) for name in ranks]
    rank, scaling = max(sorted(set(pairs)), key=pairs.count)
    return rank, alpha_of(scaling, rank)


def _fuse(gate: Factors | None, up: Factors | None, alternate: bool) -> Factors:
    """Return LoRA of the fused projection; a half without LoRA gets zeros."""
    one = gate or up
    assert one is not None
    gate = gate or Factors(one.a, torch.zeros_like(one.b), one.scaling)
    up = up or Factors(one.a, torch.zeros_like(one.b), one.scaling)
    b_up = up.b if up.scaling == gate.scaling else up.b.float() * (up.scaling / gate.scaling)
    dtype = torch.promote_types(gate.b.dtype, b_up.dtype)
    b_gate, b_up = gate.b.to(dtype), b_up.to(dtype)
    if gate.a.dtype == up.a.dtype and torch.equal(gate.a, up.a):
        return Factors(gate.a, joined(b_gate, b_up, alternate), gate.scaling)
    padded_gate = torch.nn.functional.pad(b_gate, (0, up.rank))
    padded_up = torch.nn.functional.pad(b_up, (gate.rank, 0))
    a = torch.cat((gate.a, up.a), 1)
    return Factors(a, joined(padded_gate, padded_up, alternate), gate.scaling)
