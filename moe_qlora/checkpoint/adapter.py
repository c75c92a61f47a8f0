"""A LoRA adapter folder as PEFT writes it, read as sums to be added to a model's parameters.

Names follow from structure, not from `target_modules`: the file says which modules carry LoRA. What
is inside is told from the path: PEFT wraps a module once for each of its parameters that
`target_parameters` names, in registration order, so that of n pairs on one module the one with the
most `base_layer` in its path belongs to the first.

    <path>.lora_A.weight, .lora_B.weight      (r, in), (out, r) of a Linear layer
    <path>[.base_layer ...].lora_A.weight     (E r, in), expert slowest, of an expert stack, and
    <path>[.base_layer ...].lora_B.weight     (out, r E), expert fastest
    <path>.lora_embedding_A, .lora_embedding_B    (r, rows), (columns, r) of an Embedding
    anything else                             a tensor in full, from `modules_to_save` or `bias`

A path may also be one that only the checkpoint on disk has: adapters from transformers v4 carry a
pair for each single expert. Those are added to that very tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError, CheckpointError
from .reader import Checkpoint

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_PREFIX = "base_model.model."
_PAIR = re.compile(r"^(?P<path>.+)\.lora_(?P<half>[AB])\.(?P<leaf>weight|bias)$")
_EMBEDDING = re.compile(r"^(?P<path>.+)\.lora_embedding_(?P<half>[AB])$")
_WRAPPED = ".base_layer"

# Settings under which W + s B A is not what was trained: field, the values that leave it off, why.
_UNMERGEABLE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (False, None), "DoRA rescales each row by a norm of the merged weight"),
    (
        "init_lora_weights",
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "this initialization changed the base weights, which the adapter's folder does not hold",
    ),
    ("layer_replication", (None,), "the adapted model has more layers than the base"),
    ("trainable_token_indices", (None,), "single rows of the embedding were trained"),
    ("alora_invocation_tokens", (None,), "activated LoRA applies to some tokens only"),
    ("arrow_config", (None,), "Arrow routes between adapters by token"),
    ("use_qalora", (False, None), "QA-LoRA pools the inputs"),
    ("use_bdlora", (None, False), "block-diagonal LoRA is laid out differently"),
    ("velora_config", (None,), "VeLoRA is laid out differently"),
    ("kasa_config", (None,), "KaSA rescales the base weights"),
    ("monteclora_config", (None,), "MonteCLoRA samples its weights"),
    ("megatron_config", (None,), "Megatron layers are laid out differently"),
)


@dataclass(frozen=True)
class Term:
    """s L R, to be added to one weight; L and R are read from the adapter's file when needed.

    Attributes:
        a, b: Keys in the adapter's file.
        scaling: s, alpha / r or alpha / sqrt(r).
        experts: E of a stack `(E, ...)`, 0 for a weight that is one matrix.
        flip: The weight is `(in, out)`: an embedding, Conv1D, or a transposed stack.
        bias: b is a bias, and all there is.
    """

    a: str
    b: str
    scaling: float
    experts: int = 0
    flip: bool = False
    bias: bool = False

    def factors(self, file: Checkpoint, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """L `(rows, r)` and R `(r, columns)`, or with E before both, in `dtype`; a bias twice."""
        a, b = file.read(self.a).to(dtype), file.read(self.b).to(dtype)
        if self.bias:
            return b, b
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # (E, r, in)
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # (E, out, r)
        else:
            a, b = a.flatten(1), b.flatten(1)
        return (a.mT, b.mT) if self.flip else (b, a)

    def add_rows(self, factors: tuple[Tensor, Tensor], total: Tensor, start: int) -> None:
        """Add the rows from `start` on to `total`, which holds as many of the weight, in place."""
        left, right = factors
        stop = start + len(total)
        if self.bias:
            total.add_(left[start:stop], alpha=self.scaling)
        elif not self.experts:
            total.flatten(1).addmm_(left[start:stop], right, alpha=self.scaling)
        else:
            for expert in range(start, stop):
                total[expert - start].addmm_(left[expert], right[expert], alpha=self.scaling)


@dataclass
class Updates:
    """What an adapter changes.

    Attributes:
        terms: To be added, by the model's parameter.
        disk: To be added, by the key on disk, for names that the model does not have.
        values: Keys in the adapter's file that replace a parameter or buffer, by its name.
        tied: Names of the model that are on disk under another name of the same tensor.
    """

    terms: dict[str, list[Term]] = field(default_factory=dict)
    disk: dict[str, list[Term]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Adapter:
    """An adapter folder, its configuration checked; a context manager that closes its file."""

    folder: Path
    config: Mapping[str, Any]
    file: Checkpoint

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def open_adapter(folder: Path) -> Adapter:
    """Open a LoRA adapter folder.

    Raises:
        CheckpointError: The folder, or a file in it, is missing, damaged or of another kind.
        AdapterError: It holds an adapter that cannot be merged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name the folder that PEFT saved.")
    path = folder / CONFIG
    if not path.is_file():
        kind = "holds a full model" if (folder / "config.json").is_file() else "is no PEFT adapter"
        raise CheckpointError(
            f"The adapter folder {folder} {kind}: it has no {CONFIG}; name the folder that PEFT "
            "saved the adapter to."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be read as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object, so it is no adapter's configuration.")
    _check_types(path, config)
    _refuse(folder, config)
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).exists():
            raise CheckpointError(
                f"{folder} has its weights in {PICKLE}, a pickle, which is never read: load it "
                "with PEFT and save it again, which writes safetensors."
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}.")
    return Adapter(folder, config, Checkpoint.of_files([folder / WEIGHTS]))


def _check_types(path: Path, config: Mapping[str, Any]) -> None:
    """Raise where a setting that decides sums or names is not of its type."""
    for name in ("r", "lora_alpha"):
        value = config.get(name, 8)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise CheckpointError(f"{path} is damaged: {name} is {value!r}, which is no number.")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in dict(_typed(path, config, name, Mapping) or {}).items():
            try:
                re.compile(pattern)
                usable = not isinstance(value, bool) and float(value) >= 0
            except (re.error, TypeError, ValueError):
                usable = False
            if not usable:
                raise CheckpointError(
                    f"{path} is damaged: {name} maps {pattern!r} to {value!r}; expected a regex "
                    "and a number."
                )
    names = _typed(path, config, "target_parameters", (list, str)) or []
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path} is damaged: target_parameters holds more than names.")


def _typed(path: Path, config: Mapping[str, Any], name: str, kinds: Any) -> Any:
    value = config.get(name)
    if value is not None and not isinstance(value, kinds):
        raise CheckpointError(f"{path} is damaged: {name} is {value!r}.")
    return value


def _refuse(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} holds a {kind} adapter; only LORA adapters can be merged.")
    for name, off, why in _UNMERGEABLE:
        value = config.get(name)
        if not any(value is one or (isinstance(one, str) and value == one) for one in off):
            shown = value if isinstance(value, (bool, int, str)) else "set"
            raise AdapterError(
                f"{folder} was trained with {name}={shown}, which cannot be merged into plain "
                f"weights here: {why}."
            )


class Resolver:
    """Finds the places of an adapter's tensors in a model and on its disk.

    Args:
        model: On the meta device, tied.
        disk: Shape of each tensor of the base by its key.
    """

    def __init__(self, model: nn.Module, disk: Mapping[str, tuple[int, ...]]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self._disk = disk
        self._faults: list[str] = []
        self._used: set[str] = set()

    def resolve(self, adapter: Adapter) -> Updates:
        """The places of all tensors of the adapter.

        Raises:
            AdapterError: A tensor has no place in the base, or another shape than it needs.
        """
        updates = Updates()
        self._faults = []
        pairs = self._pairs(adapter, updates)
        for path, chain in pairs.items():
            self._place(adapter, path, chain, updates)
        missing = self._missing(adapter)
        if missing:
            self._faults.append(missing)
        if self._faults:
            more = len(self._faults) - 3
            raise AdapterError(
                f"{adapter.folder} does not fit the base: {'; '.join(self._faults[:3])}"
                + (f"; and {more} more" if more > 0 else "")
                + ". Merge it into the model that it was trained on."
            )
        if not (updates.terms or updates.disk or updates.values):
            raise AdapterError(f"{adapter.folder / WEIGHTS} holds no tensor.")
        return updates

    def _pairs(self, adapter: Adapter, updates: Updates) -> dict[str, dict[int, dict[str, str]]]:
        """LoRA keys by plain path, depth of wrapping, and part; others go into `updates`."""
        pairs: dict[str, dict[int, dict[str, str]]] = {}
        for key in adapter.file:
            name = key.removeprefix(_PREFIX)
            match = _PAIR.match(name)
            part = "" if match is None else match["half"] + match["leaf"]
            if match is None and (match := _EMBEDDING.match(name)) is not None:
                part = match["half"] + "embedding"
            if match is None:
                self._whole(adapter, key, name, updates)
                continue
            path, depth = match["path"], 0
            while path.endswith(_WRAPPED):
                path, depth = path.removesuffix(_WRAPPED), depth + 1
            path = path.replace(_WRAPPED + ".", ".")
            pairs.setdefault(path, {}).setdefault(depth, {})[part] = key
        return pairs

    def _whole(self, adapter: Adapter, key: str, name: str, updates: Updates) -> None:
        """A tensor that stands for itself."""
        found = self._known(name.replace(_WRAPPED + ".", "."), self._shapes)
        shape = adapter.file.info(key).shape
        if "lora_" in key or found is None:
            self._faults.append(f"{key} {tuple(shape)} has no place")
        elif self._shapes[found] != tuple(shape):
            self._faults.append(
                f"{key} {tuple(shape)} replaces a tensor of shape {self._shapes[found]}"
            )
        else:
            updates.values[found] = key

    def _known(self, name: str, names: Iterable[str]) -> str | None:
        """The name as the model has it: as it stands, or with the body's prefix put on or off."""
        for one in (name, self._prefix + name, name.removeprefix(self._prefix)):
            if one in names:
                return one
        return None

    def _place(
        self,
        adapter: Adapter,
        path: str,
        chain: dict[int, dict[str, str]],
        updates: Updates,
    ) -> None:
        found = self._known(path, self._modules)
        if found is None:
            key = self._known(f"{path}.weight", self._disk)
            if key is None or list(chain) != [0]:
                some = next(iter(chain[min(chain)].values()))
                shape = tuple(adapter.file.info(some).shape)
                self._faults.append(f"{some} {shape} belongs to a module that it does not have")
                return
            self._add(adapter, chain[0], path, self._disk[key], None, updates.disk, key)
            return
        module = self._modules[found]
        named = self._parameters(adapter, path, found)
        targets = named
        if len(chain) == 1 and len(named) != 1 and _is_layer(module):
            targets = ["weight"]
        if len(targets) != len(chain):
            some = next(iter(chain[min(chain)].values()))
            self._faults.append(
                f"{some} is one of {len(chain)} LoRA layers on {path}, of which target_parameters "
                f"names {named or 'no parameter'}"
            )
            return
        for depth, parameter in zip(sorted(chain, reverse=True), targets, strict=True):
            name = f"{found}.{parameter}"
            said = f"{path}.{parameter}" if parameter in named else path
            shape = self._shapes[name]
            self._add(adapter, chain[depth], said, shape, module, updates.terms, name)

    def _parameters(self, adapter: Adapter, path: str, found: str) -> list[str]:
        """The module's own parameters that `target_parameters` names, in registration order."""
        asked = adapter.config.get("target_parameters") or ()
        chosen = []
        for name, _ in self._modules[found].named_parameters(recurse=False):
            full = f"{path}.{name}"
            if isinstance(asked, str):
                hit = [asked] if re.fullmatch(asked, full) else []
            else:
                hit = [one for one in asked if full == one or full.endswith(f".{one}")]
            if hit and f"{found}.{name}" in self._shapes:
                chosen.append(name)
                self._used.update(hit)
        return chosen

    def _add(
        self,
        adapter: Adapter,
        part: dict[str, str],
        said: str,
        shape: tuple[int, ...],
        module: nn.Module | None,
        into: dict[str, list[Term]],
        name: str,
    ) -> None:
        """One pair for one weight, or a fault; `said` is what patterns are matched with."""
        leaf = "embedding" if "Aembedding" in part else "weight"
        a, b = part.get(f"A{leaf}"), part.get(f"B{leaf}")
        if a is None or b is None:
            self._faults.append(f"{a or b or next(iter(part.values()))} lacks its other half")
            return
        rank, scaling = _settings(adapter.config, said)
        if rank < 1:
            self._faults.append(f"{a} has the rank {rank} by the adapter's own settings")
            return
        convolves = isinstance(module, nn.modules.conv._ConvNd)
        experts = shape[0] if len(shape) == 3 and not convolves else 0
        flip = leaf == "embedding" or type(module).__name__ == "Conv1D"
        if experts:
            flip = bool(getattr(module, "is_transposed", False))
        if len(shape) < 2 or (convolves and getattr(module, "groups", 1) != 1):
            self._faults.append(f"{a} adapts {name} of shape {shape}, which cannot be merged")
            return
        wanted = _needed(shape, rank, experts, flip)
        seen = tuple(adapter.file.info(key).shape for key in (a, b))
        if tuple(_flat(one) for one in seen) != wanted:
            self._faults.append(
                f"{a} {tuple(seen[0])} and its lora_B {tuple(seen[1])} do not fit {name} of shape "
                f"{shape}, which needs {wanted[0]} and {wanted[1]} at rank {rank}"
            )
            return
        into.setdefault(name, []).append(Term(a, b, scaling, experts, flip))
        bias = part.get("Bbias")
        if bias is not None:
            other = f"{name.removesuffix('.weight')}.bias"
            there = self._shapes if module is not None else self._disk
            if there.get(other) != tuple(adapter.file.info(bias).shape):
                self._faults.append(f"{bias} needs {other} of its own shape, which is not there")
                return
            into.setdefault(other, []).append(Term(bias, bias, scaling, bias=True))

    def _missing(self, adapter: Adapter) -> str:
        """What `target_parameters` names and the file has nothing for."""
        asked = adapter.config.get("target_parameters") or ()
        lost = sorted(({asked} if isinstance(asked, str) else set(asked)) - self._used)
        if not lost:
            return ""
        return f"target_parameters names {lost[0]}, for which the file has no tensor"


def _is_layer(module: nn.Module) -> bool:
    layers = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    return isinstance(module, layers) or type(module).__name__ == "Conv1D"


def _settings(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Rank and scaling of one target, by PEFT's rule: the first pattern that matches counts."""
    rank = int(_pattern(config.get("rank_pattern"), name, config.get("r", 8)))
    alpha = _pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    return rank, alpha / max(math.sqrt(rank) if config.get("use_rslora") else rank, 1)


def _pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _needed(
    shape: tuple[int, ...], rank: int, experts: int, flip: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of lora_A and lora_B, further dimensions flattened."""
    if experts:
        rows, columns = shape[1:]
        out, inner = (columns, rows) if flip else (rows, columns)
        return (experts * rank, inner), (out, rank * experts)
    rows, columns = shape[0], math.prod(shape[1:])
    out, inner = (columns, rows) if flip else (rows, columns)
    return (rank, inner), (out, rank)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else tuple(shape)
