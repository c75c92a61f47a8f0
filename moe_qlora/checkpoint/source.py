"""Describe the checkpoint in a folder, and the base of an adapter by a fingerprint.

A file is described by its size, its header and samples of its content: object stores and
reproducible archives give equal sizes and times to different files.

The fingerprint in the note beside an adapter tells its base from a model whose names and shapes
happen to fit: configuration fields that change the forward, and for each of some hundred unpacked
weights (embeddings, routers) one bit, set if the weight is above their mean. Packing or further
training of the base leaves most bits; of another model's bits, half agree by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from ..errors import AdapterError, CheckpointError
from ..layout import unwrapped_name
from ..models.files import reading
from .manifest import CONFIG, Source, SourceFile
from .prequantized.open import MODELOPT_CONFIG
from .reader import INDEX_SUFFIX, header_bytes

# Samples of a file: number of pieces at even distances, bytes of each.
_PIECES, _PIECE = 64, 1 << 16
TOP_K_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
    "moe_k",
)
_FIELDS = (
    "model_type",
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "hidden_act", "hidden_activation"),
    *("scoring_func", "norm_topk_prob", *TOP_K_FIELDS),
)
SAMPLED_ROWS = 64  # first rows of each sampled weight
_WEIGHTS, _BITS = 8, 256  # sampled weights, and bits of each
_LEAST_AGREEMENT = 0.8


def describe_source(folder: Path, files: Iterable[Path]) -> Source:
    """Return the manifest's entry for the checkpoint in a folder, of which `files` are packed."""
    described = {file.name: _describe(file) for file in files}
    return Source(folder.name, _describe(folder / CONFIG).sample_sha256, described)


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and content hash of each file, to compare copies that ranks read."""
    facts = {}
    for file in sorted(folder.glob("*")):
        named = file.name in (CONFIG, MODELOPT_CONFIG)
        named = named or file.name.endswith((".safetensors", INDEX_SUFFIX))
        if named and file.is_file():  # opening a pipe would wait for its writer
            one = _describe(file)
            content = hashlib.sha256((one.header_sha256 + one.sample_sha256).encode()).hexdigest()
            facts[f"{file.name} of the checkpoint"] = f"{one.nbytes:,} bytes, {content[:12]}"
    return facts


def _describe(file: Path) -> SourceFile:
    header = ""
    with suppress(CheckpointError):  # configurations have none
        header = hashlib.sha256(header_bytes(file)).hexdigest()
    with reading(file):
        size = file.stat().st_size
        return SourceFile(size, header, _sample(file, size))


def _sample(file: Path, size: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        if size <= _PIECES * _PIECE:
            digest.update(handle.read())
        else:
            for number in range(_PIECES):
                handle.seek((size - _PIECE) * number // (_PIECES - 1))
                digest.update(handle.read(_PIECE))
    return digest.hexdigest()


@checked(frozen=True)
class Fingerprint:
    """A model's fingerprint; `bits` are hexadecimal, by the name of the weight."""

    name: str
    fields: dict[str, bool | int | str]
    bits: dict[str, Annotated[str, Field(pattern="^[0-9a-f]+$")]]


def of_model(model: nn.Module, names: Iterable[str] | None = None) -> Fingerprint:
    """Return a model's fingerprint by these weights; None samples weights that packing skips.

    Of a weight that FSDP2 has sharded, the first rank has the rows to sample, and writes the note;
    no other rank could compare it, so that a comparison leaves such weights out on all of them.
    """
    weights = _left_alone(model, _first_rows if names is None else lambda weight: weight)
    if names is None:
        chosen = list(weights)
        names = chosen[:: max(len(chosen) // _WEIGHTS, 1)][:_WEIGHTS]
    return fingerprint(model, getattr(model, "name_or_path", ""), names, weights.get)


def fingerprint(
    model: nn.Module, name: str, names: Iterable[str], weight: Callable[[str], Tensor | None]
) -> Fingerprint:
    """Return the fingerprint of a model called `name`; `weight(name)` returns a weight or None."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Read from the dict: some attributes raise if they differ between layers.
    stored = {"model_type": getattr(text, "model_type", None), **getattr(text, "__dict__", {})}
    fields = {field: stored.get(field) for field in _FIELDS}
    bits = {one: _bits(values) for one in names if (values := weight(one)) is not None}
    return Fingerprint(
        name or f"an unnamed {fields['model_type']} model",
        {field: value for field, value in fields.items() if isinstance(value, (bool, int, str))},
        {one: text for one, text in bits.items() if text},
    )


def check_base(adapter: str, noted: Fingerprint, base: Fingerprint) -> None:
    """Raise if the base differs from the noted one in a configuration field or in its weights."""
    advice = "use it with the model that it was trained on, or pass any_base=True (--any-base)"
    for field in noted.fields.keys() & base.fields.keys():
        was, now = noted.fields[field], base.fields[field]
        if was != now:
            raise AdapterError(
                f"{adapter} was trained on {noted.name}, with {field}={was!r}, and {base.name} has "
                f"{field}={now!r}: {advice}."
            )
    shared = [name for name in noted.bits if len(base.bits.get(name, "")) == len(noted.bits[name])]
    total = sum(4 * len(noted.bits[name]) for name in shared)
    other = sum((int(noted.bits[n], 16) ^ int(base.bits[n], 16)).bit_count() for n in shared)
    if total and 1 - other / total < _LEAST_AGREEMENT:
        raise AdapterError(
            f"{adapter} was trained on {noted.name}, and {base.name} has other weights "
            f"({', '.join(shared[:2])}): {advice}."
        )


def _first_rows(weight: Tensor) -> Tensor:
    host: Any = weight
    if not hasattr(weight, "to_local") or any(host.device_mesh.get_coordinate()):
        return weight
    rows = host.to_local()
    whole = rows.shape[1:] == weight.shape[1:] and len(rows) >= min(SAMPLED_ROWS, len(weight))
    return nn.Parameter(rows, requires_grad=False) if whole else weight


def _left_alone(model: nn.Module, local: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return matrices outside of Linear layers, by name without adapters; none on meta."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights: dict[str, Tensor] = {}
    for name, weight in ((name, local(weight)) for name, weight in model.named_parameters()):
        plain = type(weight) is nn.Parameter and weight.dim() == 2 and not weight.is_meta
        inside = any(part in name for part in (".parametrizations.", ".modules_to_save.", ".lora_"))
        if plain and not inside and name.rpartition(".")[0] not in linears:
            weights[unwrapped_name(name).replace(".original_module", "")] = weight
    return weights


def _bits(weight: Tensor) -> str:
    """Return a bit for each sampled weight, set above the mean, in hex; "" if all are equal."""
    rows = weight.detach()[:SAMPLED_ROWS].flatten()
    places = torch.linspace(0, rows.numel() - 1, _BITS).long()
    values = rows[places.to(rows.device)].double().cpu()
    if not values.numel() or bool((values == values[0]).all()):
        return ""
    above = (values > values.mean()).tolist()
    return f"{int(''.join(str(int(bit)) for bit in above), 2):0{_BITS // 4}x}"
