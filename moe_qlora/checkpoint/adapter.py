"""A LoRA adapter folder as PEFT writes it (`open_adapter`), as deltas to parameters (`Updates`).

Which modules have LoRA follows from the keys of the file, not from `target_modules`. PEFT wraps a
module once for each parameter that `target_parameters` names, in registration order: of several
pairs on one module, the one with the most `base_layer` in its path is the first parameter's.

    <path>.lora_A.weight, .lora_B.weight      (r, in), (out, r) of a Linear layer
    <path>[.base_layer ...].lora_A.weight     (E r, in), expert slowest, of a fused expert weight
    <path>[.base_layer ...].lora_B.weight     (out, r E), expert fastest
    <path>.lora_embedding_A, .lora_embedding_B    (r, rows), (columns, r) of an Embedding
    <path>.token_adapter.trainable_tokens_delta   (tokens, columns), rows of an embedding
    anything else                             a whole tensor, from `modules_to_save` or `bias`

With resized embeddings, PEFT writes the trained `<path>.weight` as `<path>.modules_to_save.weight`
too, beside the base's own `<path>.original_module.weight`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from ..errors import AdapterError, CheckpointError
from ..layout import unwrapped_name
from ..models.files import read_json
from .folder import Checkpoint, inside, parse_fields
from .manifest import canonical_name

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
# of one expert, or of one projection of all experts
SINGLE_EXPERT = re.compile(r"\.experts\.(\d+\.\w+|(gate|up|down)_proj|w[123])\.lora_[AB]\.weight$")
PAIR = re.compile(
    r"(?P<path>.+?)(?P<wrapped>(\.base_layer)*)"
    r"\.lora_((?P<half>[AB])\.weight|embedding_(?P<rows>[AB]))$"
)
_WRAPPED = ".base_layer"
_TOKENS = ".token_adapter.trainable_tokens_delta"

Variant = tuple[str, tuple[Any, ...], str]  # a LoraConfig's field, values that leave it off, why
LORA_VARIANTS: tuple[Variant, ...] = (
    ("use_dora", (False, None), "DoRA rescales each row by a norm of the unpacked, merged weight"),
    ("layer_replication", (None,), "the adapted model has more layers than the base"),
    ("alora_invocation_tokens", (None,), "activated LoRA applies to some tokens only"),
    ("arrow_config", (None,), "Arrow routes between adapters by token"),
    ("use_qalora", (False, None), "QA-LoRA pools the inputs"),
    ("use_bdlora", (None, False), "block-diagonal LoRA is laid out differently"),
    ("velora_config", (None,), "VeLoRA is laid out differently"),
    ("kasa_config", (None,), "KaSA rescales the base weights"),
    ("monteclora_config", (None,), "MonteCLoRA samples its weights"),
    ("megatron_config", (None,), "Megatron layers are laid out differently"),
)
"""Variants of LoRA that compute something else than W + s B A, for merging and packed experts."""

_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_CHANGED = "this initialization changed the base weights, which the adapter's folder does not hold"
_UNMERGEABLE: tuple[Variant, ...] = (
    *LORA_VARIANTS,
    ("init_lora_weights", _INITS, _CHANGED),
    ("lora_bias", (False, None), "the bias of lora_B has no place in many layers"),
)


def unsupported(
    variants: Iterable[Variant], read: Callable[[str, Any], Any]
) -> tuple[str, Any, str] | None:
    """Return field, value and reason of the first variant that is on; `read(field, default)`."""
    for name, off, why in variants:
        value = read(name, off[0])
        # By identity: 0 is not False here, and a config object need not compare with one.
        if not any(value is one or (isinstance(value, str) and value == one) for one in off):
            return name, value, why
    return None


@dataclass(frozen=True)
class LoraDelta:
    """The product s L R that is added to one weight; L and R are read on use."""

    a: str  # keys of the factors in the adapter's file
    b: str
    scaling: float  # s, alpha / r or alpha / sqrt(r)
    experts: int = 0  # E of a fused expert weight (E, ...), 0 for a weight that is one matrix
    flip: bool = False  # the weight is (in, out): an embedding, Conv1D, or transposed experts
    tokens: tuple[int, ...] = ()  # b has these rows of the weight; they replace its own

    def factors(self, file: Checkpoint, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return L `(rows, r)` and R `(r, columns)`, with E before both; trained rows twice."""
        a, b = file.read(self.a).to(dtype), file.read(self.b).to(dtype)
        if self.tokens:
            return b, b
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # (E, r, in)
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # (E, out, r)
        return (a.mT, b.mT) if self.flip else (b, a)

    def add_rows(self, factors: tuple[Tensor, Tensor], total: Tensor, start: int) -> None:
        """Add the delta's rows from `start` on to `total` in place, `len(total)` of them."""
        left, right = factors
        stop = start + len(total)
        if self.tokens:
            here = [at for at, token in enumerate(self.tokens) if start <= token < stop]
            total[[self.tokens[at] - start for at in here]] = left[here]
        elif not self.experts:
            total.addmm_(left[start:stop], right, alpha=self.scaling)
        else:
            for expert in range(start, stop):
                total[expert - start].addmm_(left[expert], right[expert], alpha=self.scaling)


_END_OF_NAME = r"(.*\.)?({})$"  # as PEFT matches patterns


def _check_regex(value: Any) -> Any:
    try:
        if isinstance(value, str):
            re.compile(_END_OF_NAME.format(value))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression ({error})") from error
    return value


_Pattern = Annotated[str, AfterValidator(_check_regex)]
# Strict: PEFT takes a value as it is, so that "no" is true.
_Flag = Annotated[bool, Field(strict=True)] | None
_Rank = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
_Alpha = Annotated[
    float, Field(strict=True, ge=0, le=torch.finfo(torch.float32).max, allow_inf_nan=False)
]
_Tokens = list[Annotated[int, Field(strict=True, ge=0)]]


@checked(frozen=True)
class LoraSettings:
    """Fields of adapter_config.json that change the deltas, their targets or a load."""

    r: _Rank = 8
    lora_alpha: _Alpha = 8
    rank_pattern: dict[_Pattern, _Rank] | None = None
    alpha_pattern: dict[_Pattern, _Alpha] | None = None
    use_rslora: _Flag = None
    inference_mode: _Flag = None
    target_parameters: Annotated[list[str] | str | None, AfterValidator(_check_regex)] = None
    base_model_name_or_path: str | None = None
    trainable_token_indices: _Tokens | dict[str, _Tokens] | None = None

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return rank and scaling of a target: as in PEFT, the first matching pattern counts."""
        found: list[Any] = [self.r, self.lora_alpha]
        for at, patterns in enumerate((self.rank_pattern, self.alpha_pattern)):
            for pattern, value in reversed((patterns or {}).items()):
                if re.match(_END_OF_NAME.format(pattern), name):
                    found[at] = value
        rank, alpha = found
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter folder with a checked configuration; the caller closes `file`."""

    folder: Path
    settings: LoraSettings
    file: Checkpoint

    def is_on(self, model: nn.Module) -> bool:
        """Whether a model has the modules that LoRA is on, as far as the file's names tell."""
        modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
        found = (PAIR.match(key.removeprefix(PREFIX)) for key in self.file)
        paths = {match["path"].replace(_WRAPPED, "") for match in found if match}
        return all(canonical_name(model, path, modules) for path in paths)


def open_adapter(folder: Path) -> Adapter:
    """Open a LoRA adapter folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is no adapter: it has no {CONFIG}; name one of PEFT.")
    config = read_json(inside(folder, CONFIG))
    settings = parse_fields(LoraSettings, config, path)
    if (peft_type := config.get("peft_type")) != "LORA":
        raise AdapterError(f"{folder} holds a {peft_type} adapter; only LoRA can be merged.")
    if found := unsupported(_UNMERGEABLE, config.get):
        name, value, why = found
        shown = value if isinstance(value, (bool, int, str)) else "set"
        raise AdapterError(f"{folder} was trained with {name}={shown}, which is not merged: {why}.")
    if not (folder / WEIGHTS).is_file():
        pickled = f" but {PICKLE}, a pickle, which is never read" * (folder / PICKLE).exists()
        raise CheckpointError(f"{folder} has no {WEIGHTS}{pickled}: save it again with PEFT.")
    return Adapter(folder, settings, Checkpoint([inside(folder, WEIGHTS)]))


def single_expert(model: nn.Module, keys: Iterable[str]) -> str | None:
    """Return the first key of LoRA on a single expert's layer that the model does not have."""
    modules = {unwrapped_name(name) for name, _ in model.named_modules()}
    for key in filter(SINGLE_EXPERT.search, keys):
        if not canonical_name(model, key.removeprefix(PREFIX).rpartition(".lora_")[0], modules):
            return key
    return None


def of_single_experts(adapter: Path | str, key: str) -> AdapterError:
    """Return the error for LoRA on Linear layers of single experts, where experts are fused."""
    return AdapterError(
        f"{adapter} was trained on the Linear layers of single experts ({key}), and this model has "
        "fused experts: merge it with the transformers version that it was trained with, or train "
        "a new adapter on the fused experts."
    )


def vocabulary(model: Any, *, inputs: bool = True) -> list[str]:
    """Return the names of the parameters of the embeddings, if `inputs`, and of the head."""
    resized = set()
    for getter in ("get_input_embeddings", "get_output_embeddings")[not inputs :]:
        with suppress(NotImplementedError, AttributeError):
            resized.add(getattr(model, getter)())
    return [
        f"{name}.{parameter}".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if module in resized
        for parameter, _ in module.named_parameters(recurse=False)
    ]


class Updates:
    """The changes of an adapter to the parameters of a tied meta model, or of its new `head`."""

    def __init__(
        self, model: nn.Module, adapter: Adapter, head: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        self.deltas: dict[str, list[LoraDelta]] = {}  # by the parameter's name
        # by the name of the replaced parameter or buffer: the key in the adapter's file
        self.replacements: dict[str, str] = {}
        # names of tied tensors that are on disk under another name
        self.tied: set[str] = set()
        # names that the base ties and the adapter does not: the name of the base's values
        self.untied: dict[str, str] = {}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        tensors = {**model.state_dict(), **head}
        self._shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self._resizable = {*vocabulary(model), *head}
        self._known = partial(canonical_name, model)
        self._file, self._adapter = adapter.file, adapter
        wanted = adapter.settings.target_parameters or ()
        self._targets = [wanted] if isinstance(wanted, str) else wanted
        self._matched: set[str] = set()
        try:
            self._resolve()
        except ValueError as fault:
            name = adapter.settings.base_model_name_or_path or "a model that it does not name"
            raise AdapterError(
                f"{adapter.folder} was trained on {name} and does not fit the base: {fault}. Merge "
                "it into the model that it was trained on."
            ) from fault
        if not (self.deltas or self.replacements):
            raise AdapterError(f"{adapter.folder / WEIGHTS} holds no tensor.")

    def _resolve(self) -> None:
        # by unwrapped path and length of wrappers: keys of one LoRA layer by "A", "B", "Aembedding"
        pairs: dict[str, dict[int, dict[str, str]]] = {}
        tokens: dict[str, str] = {}  # keys of trained rows by the path of their module
        for key in self._file:
            name = key.removeprefix(PREFIX)
            plain = name.replace(_WRAPPED + ".", ".")
            if match := PAIR.match(name):
                part = match["half"] or match["rows"] + "embedding"
                by_depth = pairs.setdefault(match["path"].replace(_WRAPPED, ""), {})
                by_depth.setdefault(len(match["wrapped"]), {})[part] = key
            elif plain.endswith(_TOKENS):
                tokens[plain.removesuffix(_TOKENS)] = key
            else:
                self._replace(key, plain)
        for path, by_depth in pairs.items():
            self._place(path, [by_depth[depth] for depth in sorted(by_depth, reverse=True)])
        for path, key in tokens.items():
            self._place_tokens(path, key)
        if self._adapter.settings.trainable_token_indices and not tokens:
            raise ValueError("trainable_token_indices is set, and the file has no such rows")
        if unmatched := sorted(set(self._targets) - self._matched):
            raise ValueError(f"target_parameters names {unmatched[0]}, for which the file has none")

    def _replace(self, key: str, name: str) -> None:
        name = name.replace(".token_adapter.", ".")
        trained = re.sub(r"\.(original_module|modules_to_save)\.", ".", name)
        if trained != name and PREFIX + trained in self._file:
            return
        name = name.replace(".modules_to_save.", ".")
        target, shape = self._known(name, self._shapes), self._file.info(key).shape
        if "lora_" in key or target is None:
            raise ValueError(f"{key} {shape} has no place")
        old = self._shapes[target]
        if shape != old and not (target in self._resizable and shape[1:] == old[1:]):
            raise ValueError(f"{key} {shape} replaces a tensor of shape {old}")
        self._shapes[target] = shape
        self.replacements[target] = key

    def _place_tokens(self, path: str, key: str) -> None:
        target = self._known(f"{path}.weight", self._shapes) or ""
        tokens = self._adapter.settings.trainable_token_indices or []
        if isinstance(tokens, dict):  # a tied head is in the file and need not be named
            named = [rows for name, rows in tokens.items() if f".{path}".endswith(f".{name}")]
            tokens = next(iter(named or tokens.values()), [])
        shape, (rows, *columns) = self._file.info(key).shape, self._shapes.get(target, (0,))
        if not target or shape != (len(tokens), *columns) or max(tokens, default=-1) >= rows:
            raise ValueError(
                f"{key} {shape} does not fit {len(tokens)} trainable_token_indices of a weight of "
                f"shape {(rows, *columns)}"
            )
        delta = LoraDelta(key, key, 1.0, tokens=tuple(tokens))
        self.deltas.setdefault(target, []).insert(0, delta)  # PEFT puts LoRA around it

    def _place(self, path: str, pairs: list[dict[str, str]]) -> None:
        first = next(iter(pairs[-1].values()))
        module_name = self._known(path, self._modules)
        if module_name is None:
            if SINGLE_EXPERT.search(first):
                raise of_single_experts(self._adapter.folder, first)
            shape = self._file.info(first).shape
            raise ValueError(f"{first} {shape} belongs to a module that it does not have")
        module, named = self._modules[module_name], list[str]()  # named in registration order
        is_regex = isinstance(self._adapter.settings.target_parameters, str)
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            matches = partial(re.fullmatch, string=full) if is_regex else f".{full}".endswith
            hits = {one for one in self._targets if matches(one if is_regex else f".{one}")}
            if hits and f"{module_name}.{name}" in self._shapes:
                named.append(name)
                self._matched |= hits
        layers = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
        is_layer = isinstance(module, layers) or type(module).__name__ == "Conv1D"
        parameters = ["weight"] if is_layer and len(pairs) == 1 and len(named) != 1 else named
        if len(parameters) != len(pairs):
            raise ValueError(
                f"{first} is one of {len(pairs)} LoRA layers on {path}, of which "
                f"target_parameters names {named or 'no parameter'}"
            )
        for pair, parameter in zip(pairs, parameters, strict=True):
            target = f"{path}.{parameter}" if parameter in named else path
            self._add(pair, target, module, f"{module_name}.{parameter}")

    def _add(self, pair: dict[str, str], target: str, module: nn.Module, name: str) -> None:
        # patterns of the config match `target`
        leaf = "embedding" if "Aembedding" in pair else ""
        a, b = pair.get(f"A{leaf}"), pair.get(f"B{leaf}")
        if a is None or b is None:
            raise ValueError(f"{a or b or next(iter(pair.values()))} lacks its other half")
        rank, scaling = self._adapter.settings.rank_and_scaling(target)
        shape = self._shapes[name]
        if len(shape) not in (2, 3) or isinstance(module, nn.modules.conv._ConvNd):
            raise ValueError(f"{a} adapts {name} of shape {shape}, which cannot be merged")
        experts = shape[0] if len(shape) == 3 else 0
        flip = bool(leaf) or type(module).__name__ == "Conv1D"
        flip = bool(getattr(module, "is_transposed", False)) if experts else flip
        out, inner = shape[-2:][:: -1 if flip else 1]
        wanted = ((max(experts, 1) * rank, inner), (out, rank * max(experts, 1)))
        stored = tuple(self._file.info(key).shape for key in (a, b))
        if stored != wanted:
            raise ValueError(
                f"{a} {stored[0]} and its lora_B {stored[1]} do not fit {name} of shape "
                f"{shape}, which needs {wanted[0]} and {wanted[1]} at rank {rank}"
            )
        self.deltas.setdefault(name, []).append(LoraDelta(a, b, scaling, experts, flip))
