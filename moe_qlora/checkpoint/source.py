"""Which checkpoint a folder holds: told by content, and cheap enough to be asked twice.

Sizes and times do not tell: object stores and reproducible archives give equal ones to files that
differ. Compared are the header and samples of the content of each file, and what the system says of
it, in which a file that another has replaced mostly differs even where the samples are equal.

An adapter's base is told from another model, whose names and shapes happen to fit, by a fingerprint
in the note beside the adapter: configuration fields that decide what is computed, and one bit for
each of some hundred weights that packing leaves alone (embeddings, routers): whether the weight is
above their mean. Packing a base or training it further leaves most bits as they are; of another
model's, half agree by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
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

_Facts = tuple[int, str, str, int, int, int]
_PIECES, _PIECE = 64, 1 << 16  # sampled of a file: pieces at even distances, of so many bytes
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
SAMPLED_ROWS = 64  # of each weight that is looked at, from the first on
_WEIGHTS, _BITS = 8, 256  # how many weights are looked at, and bits of each
_LEAST_AGREEMENT = 0.8


@dataclass(frozen=True)
class Identity:
    """What tells the checkpoint in a folder from others.

    `files` has configurations, the index and the safetensors files by name: what a `SourceFile`
    says of each, its inode, and the times at which its content and it itself were changed.
    """

    folder: Path
    files: dict[str, _Facts]

    def source(self, names: Iterable[str]) -> Source:
        """Return what a manifest says of the checkpoint, given the files that were read."""
        files = {name: SourceFile(*self.files[name][:3]) for name in names}
        return Source(self.folder.name, self.files[CONFIG][2], files)

    def check_again(self) -> None:
        """Raise where the folder holds another checkpoint by now."""
        # A file's inode and the time of its change tell, and its content need not be read again.
        seen, now = (_without_samples(files) for files in (self.files, _files(self.folder, False)))
        changed = sorted(name for name in {*seen, *now} if seen.get(name) != now.get(name))
        if changed:
            raise CheckpointError(
                f"{self.folder / changed[0]} changed while the folder was read, and two "
                "checkpoints are not mixed: run it again when nothing writes there."
            )


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and content of each file of a checkpoint, for ranks that read copies of it."""
    facts = {}
    for name, (size, header, sample, *_) in identify(folder).files.items():
        content = hashlib.sha256((header + sample).encode()).hexdigest()
        facts[f"{name} of the checkpoint"] = f"{size:,} bytes, {content[:12]}"
    return facts


def identify(folder: Path) -> Identity:
    """Identify the checkpoint in a folder."""
    return Identity(folder, _files(folder, True))


def _without_samples(files: dict[str, _Facts]) -> dict[str, tuple[object, ...]]:
    return {name: (size, header, *times) for name, (size, header, _, *times) in files.items()}


def _files(folder: Path, samples: bool) -> dict[str, _Facts]:
    files = {}
    with reading(folder):
        for file in sorted(folder.glob("*")):  # none where there is no folder
            named = file.name in (CONFIG, MODELOPT_CONFIG)
            named = named or file.name.endswith((".safetensors", INDEX_SUFFIX))
            if named and file.is_file():  # to open a pipe would wait for its writer
                header, status = "", file.stat()
                with suppress(CheckpointError):  # not every file has one, and need be read at all
                    header = hashlib.sha256(header_bytes(file)).hexdigest()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                sample = _sample(file, status.st_size) if samples else ""
                files[file.name] = (status.st_size, header, sample, status.st_ino, *times)
    return files


def _sample(file: Path, size: int) -> str:
    """Return the checksum of pieces of a file, of all of it where it is small."""
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
    """What tells one model from another; `bits` are hexadecimal, by the name of the weight."""

    name: str
    fields: dict[str, bool | int | str]
    bits: dict[str, Annotated[str, Field(pattern="^[0-9a-f]+$")]]


def of_model(model: nn.Module, names: Iterable[str] | None = None) -> Fingerprint:
    """Return a model's fingerprint, by the named weights or by ones that packing leaves alone."""
    weights = _left_alone(model)
    if names is None:
        chosen = list(weights)
        names = chosen[:: max(len(chosen) // _WEIGHTS, 1)][:_WEIGHTS]
    return take(model, getattr(model, "name_or_path", ""), names, weights.get)


def take(
    model: nn.Module, name: str, names: Iterable[str], weight: Callable[[str], Tensor | None]
) -> Fingerprint:
    """Return the fingerprint of a model called `name`, whose weights are given by a function."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Past the attributes, of which some raise where they differ between layers.
    stored = {"model_type": getattr(text, "model_type", None), **getattr(text, "__dict__", {})}
    fields = {field: stored.get(field) for field in _FIELDS}
    bits = {one: _bits(values) for one in names if (values := weight(one)) is not None}
    return Fingerprint(
        name or f"an unnamed {fields['model_type']} model",
        {field: value for field, value in fields.items() if isinstance(value, (bool, int, str))},
        {one: text for one, text in bits.items() if text},
    )


def check_base(adapter: str, noted: Fingerprint, base: Fingerprint) -> None:
    """Refuse a base that computes otherwise than the noted one, or has other weights."""
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
            f"{adapter} was trained on {noted.name}, and {base.name} has the same shapes but other "
            f"weights ({', '.join(shared[:2])}): {advice}."
        )


def _left_alone(model: nn.Module) -> dict[str, Tensor]:
    """Return matrices of no Linear layer that hold values here, by name without adapters."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        plain = type(weight) is nn.Parameter and weight.dim() == 2 and not weight.is_meta
        inside = any(part in name for part in (".parametrizations.", ".modules_to_save.", ".lora_"))
        if plain and not inside and name.rpartition(".")[0] not in linears:
            weights[unwrapped_name(name).replace(".original_module", "")] = weight
    return weights


def _bits(weight: Tensor) -> str:
    """Return which of some weights of the first rows are above their mean; "" where all are one."""
    rows = weight.detach()[:SAMPLED_ROWS].flatten()
    places = torch.linspace(0, rows.numel() - 1, _BITS).long()
    values = rows[places.to(rows.device)].double().cpu()
    if not values.numel() or bool((values == values[0]).all()):
        return ""
    above = (values > values.mean()).tolist()
    return f"{int(''.join(str(int(bit)) for bit in above), 2):0{_BITS // 4}x}"
