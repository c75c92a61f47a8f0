"""What an adapter was trained on: the codec of its base, and the note and model card that say so.

An adapter trained on packed weights has also learnt to correct their quantization error, which the
exact weights do not have: `like_training=True` quantizes the base before the adapter is merged.
Which weights were packed, and how, comes from a packed base (whose decoded weights have the error
already), from the caller, or from the note beside the adapter (`moe_qlora_adapter.json`); it is
never guessed.

In a model card (README.md) the part between two markers is replaced; the rest is PEFT's or the
author's, and stays.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass as checked
from torch import nn

from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError, visible
from ..layout import dtype_name, name_pattern, unwrapped_name
from ..models.files import read_json
from ..packing import parametrize
from ..packing.bnb4bit import NF4
from ..packing.codec import Packer
from ..packing.linear import check_linears, linear_kind
from ..packing.selection import weights_to_pack
from ..packing.settings import FLOAT_DTYPES, CodecSettings
from ..versions import installed_version
from .reader import inside, parse_fields
from .source import Fingerprint, check_base, of_model
from .staging import replace_file

NOTE = "moe_qlora_adapter.json"
NOTE_VERSION = 1
_CPU = torch.device("cpu")
_DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
CARD = "README.md"
_START, _END = "<!-- moe_qlora: start -->", "<!-- moe_qlora: end -->"
_PART = re.compile(rf"\n*{_START}.*?{_END}\n*", re.DOTALL)
_HEADER = re.compile(r"---\n.*?\n---\n", re.DOTALL)
_VERSIONS = "### Framework versions"  # PEFT adds it, and its own version, to any card
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoModel",
}
_PACKAGES = ("moe-qlora", "transformers", "peft", "bitsandbytes", "torch")


@dataclass(frozen=True)
class TrainingCodec:
    """Names of the expert weights and Linear layers that were packed in training, and the codec."""

    settings: CodecSettings
    experts: frozenset[str]
    linears: frozenset[str]
    base: Fingerprint | None = field(default=None, compare=False)  # the model; None in old notes
    # experts with the checkpoint's native codes, which are not quantized again
    native: Mapping[str, CodecSettings] = field(default_factory=dict, compare=False)
    # dtype of the weights before packing, and of decoded ones; None: unknown or mixed
    dtype: torch.dtype | None = field(default=None, compare=False)

    def __contains__(self, name: object) -> bool:
        return (name in self.experts and name not in self.native) or name in self.linears

    def packer(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU
    ) -> Packer:
        """Return a packer that packs this parameter as in training.

        `dtype` is the parameter's dtype now; it is cast to that of the training first, if known.
        """
        dtype = self.dtype or dtype
        return Packer(shape, self._linear_dtype(name) or dtype, device, self.settings)

    def decoded_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the decoded parameter, given its dtype now."""
        return dtype if self._linear_dtype(name) else self.dtype or dtype

    def _linear_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype that bitsandbytes casts a Linear layer's weight to; None for experts."""
        return self.settings.codec.linear_dtype if name in self.linears else None


def from_config(model: nn.Module, config: Any) -> TrainingCodec:
    """Return the codec of a load with this config; replaces Linear layers of the meta model."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = CodecSettings.from_config(config)
    if isinstance(config, Mapping):
        config = BitsAndBytesConfig.from_dict(dict(config))
    params = weights_to_pack(model, detect(model), config, settings)
    experts = frozenset(name for param in params for name in param.names)
    quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
    base = of_model(model)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    check_linears(model, settings)
    return TrainingCodec(settings, experts, _packed_linears(model), base)


def from_packed(model: nn.Module) -> TrainingCodec | None:
    """Return the codec of a packed model, with or without adapters; None if no expert is packed."""
    packed = list(parametrize.iter_packed(model))
    if not packed:
        return None
    weights = {
        unwrapped_name(f"{owner}.{name}".lstrip(".")): parametrize.read_packed(module, name)
        for owner, module, name in packed
    }
    how = {name: CodecSettings.of(weight) for name, weight in weights.items()}
    native = {name: settings for name, settings in how.items() if settings.codec.is_kept}
    rounded = (settings for settings in how.values() if not settings.codec.is_kept)
    layers: list[Any] = [one for one in model.modules() if parametrize.is_packed_linear(one)]
    states = [getattr(layer.weight, "quant_state", None) for layer in layers]
    settings = next(rounded, None)
    if settings is None:  # that of the first packed Linear layer
        first = states[0] if states else None
        kind = linear_kind(layers[0]) if layers else NF4.kind
        settings = CodecSettings(kind)
        if first is not None:
            settings = CodecSettings(first.quant_type, first.nested, blocksize=first.blocksize)
    linears = _packed_linears(model)
    dtypes = {weight.dtype for weight in weights.values()}
    dtypes |= {state.dtype for state in states if state is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return TrainingCodec(settings, frozenset(how), linears, of_model(model), native, dtype)


def _packed_linears(model: nn.Module) -> frozenset[str]:
    return frozenset(
        unwrapped_name(f"{name}.weight")
        for name, module in model.named_modules(remove_duplicate=False)
        if parametrize.is_packed_linear(module)
    )


def _check_dtype(name: str | None) -> str | None:
    if name is not None and name not in _DTYPES:
        raise ValueError(f"no dtype of weights ({', '.join(_DTYPES)})")
    return name


@checked
class _Note:
    format_version: int
    codec: Annotated[dict[str, Any], AfterValidator(CodecSettings.from_dict)]
    experts: list[str]
    linears: list[str]
    base: Fingerprint | None = None
    dtype: Annotated[str | None, AfterValidator(_check_dtype)] = None
    chosen_experts: dict[str, list[int]] | None = None  # of earlier versions: others have zeros


def write_note(folder: Path, packed: TrainingCodec) -> None:
    """Write the note beside an adapter."""
    settings = packed.settings.to_dict()
    note = {
        "format_version": NOTE_VERSION,
        "codec": {key: settings[key] for key in ("kind", "double_quant", "blocksize")},
        "experts": sorted(packed.experts - packed.native.keys()),
        "linears": sorted(packed.linears),
    }
    if packed.dtype is not None:
        note["dtype"] = dtype_name(packed.dtype)
    if packed.base is not None:
        note["base"] = asdict(packed.base)
    replace_file(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())


def from_note(folder: Path) -> TrainingCodec | None:
    """Read the note beside an adapter; None if there is none."""
    fields = _read_note(folder)
    if fields is None:
        return None
    settings: Any = fields.codec
    experts, linears = frozenset(fields.experts), frozenset(fields.linears)
    dtype = None if fields.dtype is None else _DTYPES[fields.dtype]
    return TrainingCodec(settings, experts, linears, fields.base, dtype=dtype)


def _read_note(folder: Path) -> _Note | None:
    file = folder / NOTE
    if not file.exists():
        return None
    note = read_json(inside(folder, NOTE))
    if note.get("format_version") != NOTE_VERSION:
        raise CheckpointError(
            f"{file} has the format version {note.get('format_version')!r}; this moe_qlora reads "
            f"{NOTE_VERSION}."
        )
    return parse_fields(_Note, note, file)


def check_noted_base(adapter: Path, base: Callable[[Iterable[str]], Fingerprint]) -> None:
    """Compare the base in an adapter's note with `base(names of sampled weights)`."""
    noted = from_note(adapter)
    if noted is not None and noted.base is not None:
        check_base(str(adapter), noted.base, base(noted.base.bits))


def choose(adapter: Path, by_config: TrainingCodec | None) -> TrainingCodec:
    """Return the codec from the note or from the caller; if both are given, they must agree."""
    noted = from_note(adapter)
    known = noted or by_config
    if known is None:
        raise ConfigError(
            f"like_training needs the codec that {adapter} was trained on, which its files do not "
            "say: pass quantization_config (--quant nf4, fp4 or int8, with --double-quant where it "
            "was used), or merge into the packed base folder."
        )
    if by_config is not None and noted is not None and _label(by_config) != _label(noted):
        raise ConfigError(
            f"quantization_config asks for {_label(by_config)}, and {adapter / NOTE} says that the "
            f"adapter was trained on {_label(noted)}; leave quantization_config out."
        )
    return known


def _label(codec: TrainingCodec) -> str:
    double = " with double quantization" if codec.settings.double_quant else ""
    return codec.settings.kind + double


def shorten_card(folder: Path) -> None:
    """Remove the text of Hugging Face's template from a model card, if nobody has filled it in."""
    from huggingface_hub import ModelCard, ModelCardData

    file = folder / CARD
    text = file.read_text(encoding="utf-8", errors="replace")
    header = found[0] if (found := _HEADER.match(text)) else ""
    body = text.removeprefix(header)
    known = {*ModelCard.from_template(ModelCardData()).text.splitlines(), _VERSIONS}
    lines = _PART.sub("\n", body).splitlines()
    if all(line in known or line.startswith("- PEFT ") for line in lines):
        part = _PART.search(body)
        replace_file(file, f"{header}{part[0] if part else ''}".encode())


def write_card(folder: Path, facts: Mapping[str, str], base: str = "", usage: str = "") -> None:
    """Write our part of a folder's model card; a card without it gets it at the end."""
    file = folder / CARD
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        named = f"base_model: {json.dumps(base)}\n" if base else ""
        text = f"---\n{named}library_name: peft\ntags:\n- lora\n- moe\n---\n"
    rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in facts.items() if value)
    table = f"## Adapter of a Mixture-of-Experts model\n\n| | |\n|---|---|\n{rows}{usage}"
    part = f"{_START}\n\n{table}\n{_END}"
    others = _PART.sub("\n", text).rstrip("\n")
    replace_file(file, f"{others}\n\n{part}\n".encode())


def facts_of(config: Mapping[str, Any], packed: TrainingCodec | None) -> dict[str, str]:
    """Return the rows of a card, given adapter_config.json and the note beside it."""
    base = packed.base if packed is not None else None
    patterns = config.get("rank_pattern") or {}
    return {
        "base": base.name if base else str(config.get("base_model_name_or_path") or ""),
        "fingerprint of the base": digest(base) if base else "",
        "base was packed as": _codec(packed) if packed is not None else "",
        "packed": f"{len(packed.experts)} expert weights, {len(packed.linears)} Linear layers"
        if packed is not None
        else "",
        "dtype in training": dtype_name(packed.dtype) if packed and packed.dtype else "",
        "rank, alpha": f"{config.get('r')}, {config.get('lora_alpha')}"
        + (f" (and {len(patterns)} ranks of single targets)" if patterns else ""),
        "target_modules": _targets(config.get("target_modules")),
        "target_parameters": _targets(config.get("target_parameters")),
        "versions": ", ".join(
            f"{name} {installed_version(name) or 'unknown'}" for name in _PACKAGES
        ),
    }


def usage_of(config: Mapping[str, Any], packed: TrainingCodec) -> str:
    """Return how a program loads and merges the adapter, in Markdown."""
    base = packed.base.name if packed.base else config.get("base_model_name_or_path")
    base = json.dumps(visible(str(base or "BASE")))
    model = _CLASSES.get(str(config.get("task_type")), "AutoModelForCausalLM")
    fields = packed.settings.bnb_fields().items()
    how = ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}=True"
        for name, value in fields
        if value is True or isinstance(value, str)
    )
    dtype = f', dtype="{dtype_name(packed.dtype)}"' if packed.dtype else ""
    return f"""
```python
import moe_qlora
from transformers import {model}, BitsAndBytesConfig

quantization = BitsAndBytesConfig({how})
with moe_qlora.enabled():
    model = {model}.from_pretrained(
        {base}, quantization_config=quantization{dtype}
    )
model = moe_qlora.load_adapter(model, "ADAPTER")  # the folder of this card
```

Merged into the 16-bit model: `moe-qlora merge BASE ADAPTER OUT`, with `--like-training` to round
the base as in training first.
"""


def digest(base: Fingerprint) -> str:
    """Return a short hash of a fingerprint, without the model's name."""
    content = {key: value for key, value in asdict(base).items() if key != "name"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _codec(packed: TrainingCodec) -> str:
    settings = packed.settings
    double = ", double quantization" if settings.double_quant else ""
    return f"{settings.kind}, blocks of {settings.blocksize}{double}"


def _targets(names: Any) -> str:
    if isinstance(names, str):
        return names
    listed = names if isinstance(names, (list, set)) else []
    return ", ".join(sorted({name_pattern(name) for name in listed if isinstance(name, str)}))


def _cell(value: str) -> str:
    """Return a value as code in a Markdown table, so that names are not read as markup."""
    plain = visible(value).replace("|", "\\|").replace("`", "'")
    return f"`{plain}`"
