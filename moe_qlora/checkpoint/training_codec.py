"""What an adapter was trained on: the codec of its base, its fingerprint, and the note of both.

An adapter trained on packed weights has also learnt to correct their quantization error, which the
exact weights do not have: `like_training=True` quantizes the base before the adapter is merged, by
the note beside the adapter (`moe_qlora_adapter.json`), or by the caller's config.

The fingerprint in the note tells the base from a model whose names and shapes happen to fit: fields
of its configuration, and for some unpacked weights (embeddings, routers) one bit for each of some
hundred values, set if it is above their mean. Packing or further training of the base leaves most
bits; of another model's bits, half agree by chance. The model card (README.md) says it to people.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from ..detection.detect import detect
from ..errors import AdapterError, ConfigError, visible
from ..layout import dtype_name, name_pattern, unwrapped_name
from ..models.files import read_json
from ..packing import parametrize
from ..packing.bnb4bit import NF4
from ..packing.decoders import check_linears, linear_kind
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from ..versions import installed_version
from .conversion import SAMPLED_ROWS
from .folder import inside, parse_fields, replace_file
from .manifest import canonical_name
from .rows import packed_linears

NOTE = "moe_qlora_adapter.json"

TOP_K_FIELDS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"),
    *("top_k_experts", "moe_k"),
)
_FIELDS = (
    "model_type",
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "hidden_act", "hidden_activation"),
    *("scoring_func", "norm_topk_prob", *TOP_K_FIELDS),
)
_WEIGHTS, _BITS = 8, 256  # sampled weights, and bits of each
_LEAST_AGREEMENT = 0.8


@checked(frozen=True)
class Fingerprint:
    """A model's fingerprint; `bits` are hexadecimal, by the name of the weight."""

    name: str
    fields: dict[str, bool | int | str]
    bits: dict[str, Annotated[str, Field(pattern="^[0-9a-f]+$")]]


@dataclass(frozen=True)
class TrainingCodec:
    """The codec of a training, and the expert weights and Linear layers that were packed by it.

    Experts with the checkpoint's native codes, which are not quantized again, are not among them.
    """

    settings: CodecSettings
    experts: frozenset[str]
    linears: frozenset[str]
    base: Fingerprint | None = None  # the model; None in old notes
    # dtype of the weights before packing, and of decoded ones; None: unknown or mixed
    dtype: torch.dtype | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.experts or name in self.linears


def from_config(model: nn.Module, config: Any) -> TrainingCodec:
    """Return the codec of a load with this config; replaces Linear layers of the meta model."""
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = CodecSettings.from_config(config)
    params = weights_to_pack(model, detect(model), settings)
    experts = frozenset(name for param in params for name in param.names)
    config = dict(config) if isinstance(config, Mapping) else copy.deepcopy(config)
    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    check_linears(model, settings)
    linears = frozenset(map(unwrapped_name, packed_linears(model)))
    return TrainingCodec(settings, experts, linears)


def from_packed(model: nn.Module) -> TrainingCodec | None:
    """Return the codec of a packed model, with or without adapters; None if no expert is packed."""
    weights = {
        unwrapped_name(f"{owner}.{name}".lstrip(".")): parametrize.read_packed(module, name)
        for owner, module, name in parametrize.iter_packed(model)
    }
    if not weights:
        return None
    how = {name: CodecSettings.of(weight) for name, weight in weights.items()}
    experts = frozenset(name for name, one in how.items() if not one.codec.is_kept)
    layers: list[Any] = [one for one in model.modules() if parametrize.is_packed_linear(one)]
    states: list[Any] = [getattr(one.weight, "quant_state", None) for one in layers]
    states = [state for state in states if state is not None]
    if experts:
        settings = next(how[name] for name in how if name in experts)
    elif states:  # that of the first packed Linear layer
        first = states[0]
        settings = CodecSettings(first.quant_type, first.nested, blocksize=first.blocksize)
    else:
        settings = CodecSettings(linear_kind(layers[0]) if layers else NF4.kind)
    linears = frozenset(map(unwrapped_name, packed_linears(model)))
    dtypes = {one.dtype for one in (*weights.values(), *states)}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return TrainingCodec(settings, experts, linears, fingerprint(model), dtype)


@checked
class _Note:
    format_version: Literal[1]
    codec: Annotated[dict[str, Any], AfterValidator(CodecSettings.from_dict)]
    experts: frozenset[str]
    linears: frozenset[str]
    base: Fingerprint | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


def write_note(folder: Path, packed: TrainingCodec) -> None:
    """Write the note beside an adapter."""
    settings = packed.settings.to_dict()
    note = {
        "format_version": 1,
        "codec": {key: settings[key] for key in ("kind", "double_quant", "blocksize")},
        "experts": sorted(packed.experts),
        "linears": sorted(packed.linears),
        **({"dtype": dtype_name(packed.dtype)} if packed.dtype else {}),
        **({"base": asdict(packed.base)} if packed.base else {}),
    }
    replace_file(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())


def from_note(folder: Path) -> TrainingCodec | None:
    """Read the note beside an adapter; None if there is none."""
    if not (folder / NOTE).exists():
        return None
    note = parse_fields(_Note, read_json(inside(folder, NOTE)), folder / NOTE)
    settings: Any = note.codec
    dtype = note.dtype and getattr(torch, note.dtype)
    return TrainingCodec(settings, note.experts, note.linears, note.base, dtype)


def of_training(adapter: Path, model: nn.Module, config: Any) -> TrainingCodec:
    """Return the codec of an adapter's training, by its note or else by the caller's config."""
    if (noted := from_note(adapter)) is None:
        if config is not None:
            return from_config(copy.deepcopy(model), config)
        raise ConfigError(
            f"like_training needs the codec that {adapter} was trained on, which its files do not "
            "say: pass quantization_config (--quant nf4, fp4 or int8, with --double-quant where it "
            "was used), or merge into the packed base folder."
        )
    both = [noted.settings, noted.settings if config is None else CodecSettings.from_config(config)]
    trained, asked = (f"{s.kind}{' with double quantization' * s.double_quant}" for s in both)
    if asked != trained:
        raise ConfigError(
            f"quantization_config asks for {asked}, and {adapter / NOTE} says that the adapter was "
            f"trained on {trained}; leave quantization_config out."
        )
    names = model.state_dict()  # the noted ones may be of its inner model
    experts, linears = (
        frozenset(canonical_name(model, name, names) or name for name in some)
        for some in (noted.experts, noted.linears)
    )
    return replace(noted, experts=experts, linears=linears)


def fingerprint(
    model: nn.Module,
    names: Iterable[str] | None = None,
    name: str = "",
    weight: Callable[[str], Tensor | None] | None = None,
) -> Fingerprint:
    """Return a model's fingerprint by these weights, or some of those that packing skips.

    Of a weight that FSDP2 has sharded, the first rank has the rows to sample, and writes the note;
    no other rank could compare it, so that a comparison leaves such weights out on all of them.
    """
    if weight is None:
        linears = {name for name, one in model.named_modules() if isinstance(one, nn.Linear)}
        own: dict[str, Tensor] = {}  # matrices outside of Linear layers, by name without adapters
        for key, parameter in model.named_parameters():
            value: Any = parameter
            if names is None and hasattr(value, "to_local"):
                rows: Any = () if any(value.device_mesh.get_coordinate()) else value.to_local()
                if len(rows) >= min(SAMPLED_ROWS, len(value)) and rows.shape[1:] == value.shape[1:]:
                    value = nn.Parameter(rows, requires_grad=False)
            skipped = re.search(r"\.(parametrizations|modules_to_save|trainable_\w+)\.|lora_", key)
            plain = type(value) is nn.Parameter and value.dim() == 2 and not value.is_meta
            if plain and not skipped and key.rpartition(".")[0] not in linears:
                own[re.sub(r"\.(original_module|token_adapter)\b", "", unwrapped_name(key))] = value
        weight, name = own.get, getattr(model, "name_or_path", "")
        if names is None:
            names = list(own)[:: max(len(own) // _WEIGHTS, 1)][:_WEIGHTS]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Read from the dict: some attributes raise if they differ between layers.
    stored = {"model_type": getattr(text, "model_type", None), **getattr(text, "__dict__", {})}
    fields = {k: v for k in _FIELDS if isinstance(v := stored.get(k), (bool, int, str))}
    bits: dict[str, str] = {}
    for key in names or ():
        if (value := weight(key)) is None or not value.numel():
            continue
        sampled = value.detach()[:SAMPLED_ROWS].flatten()
        places = torch.linspace(0, sampled.numel() - 1, _BITS).long()
        values = sampled[places.to(sampled.device)].double().cpu()
        if bool((values != values[0]).any()):  # equal ones tell nothing
            above = "".join(map(str, (values > values.mean()).int().tolist()))
            bits[key] = f"{int(above, 2):0{_BITS // 4}x}"
    return Fingerprint(name or f"an unnamed {stored['model_type']} model", fields, bits)


def check_noted_base(
    adapter: Path,
    model: nn.Module,
    name: str = "",
    weight: Callable[[str], Tensor | None] | None = None,
) -> None:
    """Raise if a model is not the noted base; `weight(name)` stands for the model's own."""
    if (trained_on := from_note(adapter)) is None or (noted := trained_on.base) is None:
        return
    base = fingerprint(model, noted.bits, name, weight)
    other = [
        f"{field}={now!r} and not {noted.fields[field]!r}"
        for field, now in base.fields.items()
        if noted.fields.get(field, now) != now
    ]
    shared = [name for name in noted.bits if len(base.bits.get(name, "")) == len(noted.bits[name])]
    total = sum(4 * len(noted.bits[name]) for name in shared)
    wrong = sum((int(noted.bits[n], 16) ^ int(base.bits[n], 16)).bit_count() for n in shared)
    if total - wrong < total * _LEAST_AGREEMENT:
        other.append(f"other weights ({', '.join(shared[:2])})")
    if other:
        raise AdapterError(
            f"{adapter} was trained on {noted.name}, and {base.name} has {other[0]}: use it with "
            "the model that it was trained on, or pass any_base=True (--any-base)."
        )


CARD = "README.md"  # ours is the part between two markers, the rest PEFT's
_START, _END = "<!-- moe_qlora: start -->", "<!-- moe_qlora: end -->"
_PART = re.compile(rf"\n*{_START}.*?{_END}\n*", re.DOTALL)
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoModel",
}
_PACKAGES = ("moe-qlora", "transformers", "peft", "bitsandbytes", "torch")
_USAGE = """
```python
import moe_qlora
from transformers import {model}, BitsAndBytesConfig

with moe_qlora.enabled():
    model = {model}.from_pretrained({base}, quantization_config=BitsAndBytesConfig({how}){dtype})
model = moe_qlora.load_adapter(model, "ADAPTER")  # the folder of this card
```

Merged into the 16-bit model: `moe-qlora merge BASE ADAPTER OUT`.
"""


def write_card(folder: Path, config: Mapping[str, Any], packed: TrainingCodec) -> None:
    """Write our part of an adapter's model card, given its config and note."""
    base = packed.base.name if packed.base else str(config.get("base_model_name_or_path") or "")
    fields = packed.settings.bnb_fields().items()
    trained = str((config.get("auto_mapping") or {}).get("base_model_class"))
    pictures = trained.endswith("ForConditionalGeneration")
    default = "AutoModelForImageTextToText" if pictures else "AutoModelForCausalLM"
    usage = _USAGE.format(
        model=_CLASSES.get(str(config.get("task_type")), default),
        base=json.dumps(visible(base or "BASE")),
        how=", ".join(f"{k}={v!r}" for k, v in fields if v is True or isinstance(v, str)),
        dtype=f', dtype="{dtype_name(packed.dtype)}"' if packed.dtype else "",
    )
    settings, facts = packed.settings, {"base": base}
    facts["base was packed as"] = settings.kind + ", double quantization" * settings.double_quant
    facts["rank, alpha"] = f"{config.get('r')}, {config.get('lora_alpha')}"
    for key in ("target_modules", "target_parameters"):
        names = config.get(key) or ()
        patterns = {name_pattern(n) for n in ([names] if isinstance(names, str) else names)}
        facts[key] = ", ".join(sorted(patterns))
    installed = ((name, installed_version(name)) for name in _PACKAGES)
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in installed if version)
    # as code, so that names are not read as markup
    plain = {n: visible(f).replace("|", "\\|").replace("`", "'") for n, f in facts.items() if f}
    rows = "".join(f"| {name} | `{value}` |\n" for name, value in plain.items())
    named = f"base_model: {json.dumps(base)}\n" if base else ""
    text, file = f"---\n{named}library_name: peft\n---\n", folder / CARD
    if file.is_file():
        text = _PART.sub("\n", file.read_text(encoding="utf-8", errors="replace"))
    table = f"## Adapter of a Mixture-of-Experts model\n\n| | |\n|---|---|\n{rows}{usage}"
    replace_file(file, f"{text.rstrip()}\n\n{_START}\n\n{table}\n{_END}\n".encode())
