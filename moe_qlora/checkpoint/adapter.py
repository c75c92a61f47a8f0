"""A LoRA adapter folder as PEFT writes it, read as deltas to a model's parameters.

    open_adapter        adapter_config.json checked, adapter_model.safetensors opened
    Resolver            each tensor's parameter in the model, or its key on disk: `Updates`

Which modules have LoRA follows from the keys of the file, not from `target_modules`. PEFT wraps a
module once for each parameter that `target_parameters` names, in registration order: of several
pairs on one module, the one with the most `base_layer` in its path is the first parameter's.

    <path>.lora_A.weight, .lora_B.weight      (r, in), (out, r) of a Linear layer
    <path>[.base_layer ...].lora_A.weight     (E r, in), expert slowest, of a fused expert weight
    <path>[.base_layer ...].lora_B.weight     (out, r E), expert fastest
    <path>.lora_embedding_A, .lora_embedding_B    (r, rows), (columns, r) of an Embedding
    <path>.token_adapter.trainable_tokens_delta   (tokens, columns), rows of an embedding
    anything else                             a whole tensor, from `modules_to_save` or `bias`

With resized embeddings, PEFT writes some tensors under several names: the trained `<path>.weight`
as `<path>.modules_to_save.weight` too, beside the base's own `<path>.original_module.weight`.

In transformers v4, Tinker, vLLM and SGLang, experts are Linear layers, or one tensor for each
projection. Such a delta is added to the tensor on disk, where that has its path; `fused_adapter`
converts these to the layout for the fused weights of a model:

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..detection.detect import detect
from ..errors import AdapterError, CheckpointError
from ..layout import ExpertParam, unwrapped_name
from ..models.files import MAX_CONFIG, read_json, read_raw
from .manifest import canonical_name
from .reader import Checkpoint, inside, parse_fields
from .staging import WRITE_ERRORS, not_written
from .training_codec import NOTE

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

PREFIX = "base_model.model."
_ROLES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
ROLE_OF_LEAF = {leaf: role for role, leaves in _ROLES.items() for leaf in leaves}
SINGLE_EXPERT = re.compile(
    r"(?P<path>.+\.experts)\.(?:(?P<expert>\d{1,9})\.)?"
    rf"(?P<leaf>{'|'.join(ROLE_OF_LEAF)})\.lora_(?P<half>[AB])\.weight$"
)
PAIR = re.compile(
    r"(?P<path>.+)\.lora_(?:(?P<half>[AB])\.(?P<leaf>weight|bias)|embedding_(?P<rows>[AB]))$"
)
_WRAPPED = ".base_layer"
_TOKENS = ".token_adapter.trainable_tokens_delta"
LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)

Variant = tuple[str, tuple[Any, ...], str]
"""A setting of LoraConfig: its field, the values that leave it off, and why it is not supported."""

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
_UNMERGEABLE = (*LORA_VARIANTS, ("init_lora_weights", _INITS, _CHANGED))


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
    bias: bool = False  # b is a bias; it is added directly
    tokens: tuple[int, ...] = ()  # b has these rows of the weight; they replace its own

    def factors(self, file: Checkpoint, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return L `(rows, r)` and R `(r, columns)`, with E before both; a bias or rows twice."""
        a, b = file.read(self.a).to(dtype), file.read(self.b).to(dtype)
        if self.bias or self.tokens:
            return b, b
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # (E, r, in)
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # (E, out, r)
        else:
            a, b = a.flatten(1), b.flatten(1)
        return (a.mT, b.mT) if self.flip else (b, a)

    def add_rows(self, factors: tuple[Tensor, Tensor], total: Tensor, start: int) -> None:
        """Add the delta's rows from `start` on to `total` in place, `len(total)` of them."""
        left, right = factors
        stop = start + len(total)
        if self.tokens:
            here = [at for at, token in enumerate(self.tokens) if start <= token < stop]
            total[[self.tokens[at] - start for at in here]] = left[here]
        elif self.bias:
            total.add_(left[start:stop], alpha=self.scaling)
        elif not self.experts:
            total.flatten(1).addmm_(left[start:stop], right, alpha=self.scaling)
        else:
            for expert in range(start, stop):
                total[expert - start].addmm_(left[expert], right[expert], alpha=self.scaling)


@dataclass
class Updates:
    """The changes of an adapter to its base."""

    # by the model's parameter name; by the key on disk if the model has no such name
    deltas: dict[str, list[LoraDelta]] = field(default_factory=dict)
    disk_deltas: dict[str, list[LoraDelta]] = field(default_factory=dict)
    # by the name of the replaced parameter or buffer: the key in the adapter's file
    replacements: dict[str, str] = field(default_factory=dict)
    # names of tied tensors that are on disk under another name
    tied: set[str] = field(default_factory=set)
    # names that the base ties and the adapter does not: the name of the base's values
    untied: dict[str, str] = field(default_factory=dict)


_END_OF_NAME = r"(.*\.)?({})$"  # as PEFT matches patterns


def _check_regex(value: Any, place: str = "{}") -> Any:
    try:
        if isinstance(value, str):
            re.compile(place.format(value))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression ({error})") from error
    return value


_Pattern = Annotated[str, AfterValidator(partial(_check_regex, place=_END_OF_NAME))]
# Strict: PEFT takes a value as it is, so that "no" is true.
_Flag = Annotated[bool, Field(strict=True)] | None
_Integer = Annotated[int, Field(strict=True)]
_Rank = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
_Alpha = Annotated[
    float, Field(strict=True, ge=0, le=torch.finfo(torch.float32).max, allow_inf_nan=False)
]
_Dropout = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
_Tokens = list[Annotated[int, Field(strict=True, ge=0)]]


@checked(frozen=True)
class LoraSettings:
    """Fields of adapter_config.json that change the deltas, their targets or a load."""

    r: _Rank = 8
    lora_alpha: _Alpha = 8
    rank_pattern: dict[_Pattern, _Rank] | None = None
    alpha_pattern: dict[_Pattern, _Alpha] | None = None
    use_rslora: _Flag = None
    use_dora: _Flag = None
    use_qalora: _Flag = None
    lora_bias: _Flag = None
    fan_in_fan_out: _Flag = None
    inference_mode: _Flag = None
    ensure_weight_tying: _Flag = None
    bias: Literal["none", "all", "lora_only"] | None = None
    lora_dropout: _Dropout | None = None
    target_parameters: Annotated[list[str] | str | None, AfterValidator(_check_regex)] = None
    layers_to_transform: list[_Integer] | _Integer | None = None
    base_model_name_or_path: str | None = None
    trainable_token_indices: _Tokens | dict[str, _Tokens] | None = None

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return rank and scaling of a target: as in PEFT, the first matching pattern counts."""

        def first(patterns: Mapping[str, Any] | None, default: Any) -> Any:
            found = (patterns or {}).items()
            return next((v for p, v in found if re.match(_END_OF_NAME.format(p), name)), default)

        rank = first(self.rank_pattern, self.r)
        alpha = first(self.alpha_pattern, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter folder with a checked configuration; the caller closes `file`."""

    folder: Path
    settings: LoraSettings
    file: Checkpoint

    def whole_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors trained in full, by the model's names."""
        names = {key.removeprefix(PREFIX): key for key in self.file}
        return {n: self.file.info(key).shape for n, key in names.items() if "lora_" not in n}

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
        raise CheckpointError(
            f"{folder} is no adapter: it has no {CONFIG}; name the folder that PEFT saved it to."
        )
    config = read_json(inside(folder, CONFIG))
    settings = parse_fields(LoraSettings, config, path)
    if (peft_type := config.get("peft_type")) != "LORA":
        raise AdapterError(
            f"{folder} holds a {peft_type} adapter; only LORA adapters can be merged."
        )
    if found := unsupported(_UNMERGEABLE, config.get):
        name, value, why = found
        shown = value if isinstance(value, (bool, int, str)) else "set"
        raise AdapterError(
            f"{folder} was trained with {name}={shown}, which cannot be merged into plain "
            f"weights here: {why}."
        )
    if not (folder / WEIGHTS).is_file():
        pickled = f" but {PICKLE}, a pickle, which is never read" * (folder / PICKLE).exists()
        raise CheckpointError(f"{folder} has no {WEIGHTS}{pickled}: save it again with PEFT.")
    return Adapter(folder, settings, Checkpoint([inside(folder, WEIGHTS)]))


def single_experts(keys: Iterable[str]) -> Iterator[str]:
    """Yield the paths of LoRA on single experts, or single projections of all experts."""
    for key in (key.removeprefix(PREFIX) for key in keys):
        if SINGLE_EXPERT.match(key):
            yield key.rpartition(".lora_")[0]


def vocabulary(model: Any, *, inputs: bool = True) -> list[str]:
    """Return the names of the parameters of the embeddings, if `inputs`, and of the head."""
    resized = []
    for getter in ("get_input_embeddings", "get_output_embeddings")[not inputs :]:
        with suppress(NotImplementedError, AttributeError):
            resized.append(getattr(model, getter)())
    return [
        f"{name}.{parameter}".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if any(module is one for one in resized)
        for parameter, _ in module.named_parameters(recurse=False)
    ]


_Pair = dict[str, str]  # keys of one LoRA layer: "Aweight", "Bweight", "Bbias", "Aembedding", ...


class Resolver:
    """Finds each adapter tensor's target in the tied meta model, its new `head`, or on disk."""

    def __init__(
        self,
        model: nn.Module,
        disk: Mapping[str, tuple[int, ...]],
        adapter: Adapter,
        head: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        tensors = {**model.state_dict(), **head}
        self._shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self._resizable = {*vocabulary(model), *head}
        self._known = partial(canonical_name, model)
        self._disk, self._file, self._adapter = disk, adapter.file, adapter
        wanted = adapter.settings.target_parameters or ()
        self._targets = [wanted] if isinstance(wanted, str) else wanted
        self._matched: set[str] = set()
        self.updates = updates = Updates()
        try:
            self._resolve()
        except ValueError as fault:
            name = adapter.settings.base_model_name_or_path or "a model that it does not name"
            raise AdapterError(
                f"{adapter.folder} was trained on {name} and does not fit the base: {fault}. Merge "
                "it into the model that it was trained on."
            ) from fault
        if not (updates.deltas or updates.disk_deltas or updates.replacements):
            raise AdapterError(f"{adapter.folder / WEIGHTS} holds no tensor.")

    def _resolve(self) -> None:
        pairs: dict[str, dict[int, _Pair]] = {}  # by unwrapped path and number of wrappers
        tokens: dict[str, str] = {}  # keys of trained rows by the path of their module
        for key in self._file:
            name = key.removeprefix(PREFIX)
            if match := PAIR.match(name):
                path, depth = match["path"], 0
                while path.endswith(_WRAPPED):
                    path, depth = path.removesuffix(_WRAPPED), depth + 1
                part = (match["half"] or match["rows"]) + (match["leaf"] or "embedding")
                by_depth = pairs.setdefault(path.replace(_WRAPPED + ".", "."), {})
                by_depth.setdefault(depth, {})[part] = key
            elif name.endswith(_TOKENS):
                path = name.replace(_WRAPPED + ".", ".").removesuffix(_TOKENS)
                tokens[path] = key
            else:
                self._replace(key, name.replace(_WRAPPED + ".", "."))
        for path, by_depth in pairs.items():
            self._place(path, by_depth)
        for path, key in tokens.items():
            self._place_tokens(path, key)
        if self._adapter.settings.trainable_token_indices and not tokens:
            raise ValueError("trainable_token_indices is set, and the file has no such rows")
        if unmatched := sorted(set(self._targets) - self._matched):
            raise ValueError(
                f"target_parameters names {unmatched[0]}, for which the file has no tensor"
            )

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
        self.updates.replacements[target] = key

    def _place_tokens(self, path: str, key: str) -> None:
        target = self._known(f"{path}.weight", self._shapes)
        shape = self._file.info(key).shape
        tokens = self._adapter.settings.trainable_token_indices or []
        if isinstance(tokens, dict):  # a tied head is in the file and need not be named
            named = [rows for name, rows in tokens.items() if f".{path}".endswith(f".{name}")]
            tokens = next(iter(named or tokens.values()), [])
        rows, *columns = self._shapes.get(target or "", (0,))
        if target is None or shape != (len(tokens), *columns) or max(tokens, default=-1) >= rows:
            raise ValueError(
                f"{key} {shape} does not fit {len(tokens)} trainable_token_indices of a weight of "
                f"shape {(rows, *columns)}"
            )
        delta = LoraDelta(key, key, 1.0, tokens=tuple(tokens))
        self.updates.deltas.setdefault(target, []).insert(0, delta)  # PEFT puts LoRA around it

    def _place(self, path: str, by_depth: dict[int, _Pair]) -> None:
        pairs = [by_depth[depth] for depth in sorted(by_depth, reverse=True)]
        first = next(iter(pairs[-1].values()))
        module_name = self._known(path, self._modules)
        if module_name is None:
            key = self._known(f"{path}.weight", self._disk)
            if key is None or list(by_depth) != [0]:
                shape = self._file.info(first).shape
                raise ValueError(f"{first} {shape} belongs to a module that it does not have")
            self._add(pairs[0], path, None, key)
            return
        module = self._modules[module_name]
        is_regex = isinstance(self._adapter.settings.target_parameters, str)
        named = []  # in registration order
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            hits = [
                target
                for target in self._targets
                if (re.fullmatch(target, full) if is_regex else f".{full}".endswith(f".{target}"))
            ]
            if hits and f"{module_name}.{name}" in self._shapes:
                named.append(name)
                self._matched.update(hits)
        is_layer = isinstance(module, LAYERS) or type(module).__name__ == "Conv1D"
        by_layer = len(pairs) == 1 and len(named) != 1 and is_layer
        parameters = ["weight"] if by_layer else named
        if len(parameters) != len(pairs):
            raise ValueError(
                f"{first} is one of {len(pairs)} LoRA layers on {path}, of which "
                f"target_parameters names {named or 'no parameter'}"
            )
        for pair, parameter in zip(pairs, parameters, strict=True):
            target = f"{path}.{parameter}" if parameter in named else path
            self._add(pair, target, module, f"{module_name}.{parameter}")

    def _add(self, pair: _Pair, target: str, module: nn.Module | None, name: str) -> None:
        # `name` is a key on disk if there is no module; patterns of the config match `target`.
        leaf = "embedding" if "Aembedding" in pair else "weight"
        a, b = pair.get(f"A{leaf}"), pair.get(f"B{leaf}")
        if a is None or b is None:
            raise ValueError(f"{a or b or next(iter(pair.values()))} lacks its other half")
        rank, scaling = self._adapter.settings.rank_and_scaling(target)
        shapes = self._disk if module is None else self._shapes
        deltas = self.updates.disk_deltas if module is None else self.updates.deltas
        shape = shapes[name]
        convolves = isinstance(module, nn.modules.conv._ConvNd)
        if len(shape) < 2 or (convolves and getattr(module, "groups", 1) != 1):
            raise ValueError(f"{a} adapts {name} of shape {shape}, which cannot be merged")
        experts = shape[0] if len(shape) == 3 and not convolves else 0
        flip = leaf == "embedding" or type(module).__name__ == "Conv1D"
        if experts:
            flip = bool(getattr(module, "is_transposed", False))
        rows, columns = shape[1:] if experts else _flat(shape)
        out, inner = (columns, rows) if flip else (rows, columns)
        wanted = ((max(experts, 1) * rank, inner), (out, rank * max(experts, 1)))
        stored = tuple(self._file.info(key).shape for key in (a, b))
        if tuple(map(_flat, stored)) != wanted:
            raise ValueError(
                f"{a} {stored[0]} and its lora_B {stored[1]} do not fit {name} of shape "
                f"{shape}, which needs {wanted[0]} and {wanted[1]} at rank {rank}"
            )
        deltas.setdefault(name, []).append(LoraDelta(a, b, scaling, experts, flip))
        if (bias := pair.get("Bbias")) is not None:
            other = f"{name.removesuffix('.weight')}.bias"
            if shapes.get(other) != self._file.info(bias).shape:
                raise ValueError(f"{bias} needs {other} of its own shape, which is not there")
            deltas.setdefault(other, []).append(LoraDelta(bias, bias, scaling, bias=True))


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape


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
def fused_adapter(folder: Path, model: nn.Module) -> Iterator[Path]:
    """Yield an adapter folder with LoRA on fused expert weights: itself, or a temporary one."""
    modules: dict[str, dict[str, ExpertParam]] = {}
    for param in detect(model):
        modules.setdefault(unwrapped_name(param.module_name), {})[param.role] = param
    modules = {name: roles for name, roles in modules.items() if "down" in roles}
    if not modules or not (folder / WEIGHTS).is_file():
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
            place = f"TMPDIR, which is {tempfile.tempdir or 'no folder'},"
            raise CheckpointError(not_written(place, error)) from error
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


def uniform(ranks: Mapping[str, int], scalings: Mapping[str, float]) -> tuple[int, float]:
    """Return the commonest rank and the `lora_alpha` of its commonest scaling."""
    pairs = [(ranks[name], scalings[name]) for name in ranks]
    rank, scaling = max(sorted(set(pairs)), key=pairs.count)
    return rank, alpha_of(scaling, rank)


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
            if match := SINGLE_EXPERT.match(key.removeprefix(PREFIX)):
                expert = None if match["expert"] is None else int(match["expert"])
                roles = keys.setdefault(self._module(match["path"]), {})
                roles.setdefault(ROLE_OF_LEAF[match["leaf"]], {})[expert, match["half"]] = key
            else:
                others.append(key)
        for module, roles in keys.items():
            self._fuse_module(module, {role: self._stacked(roles[role]) for role in roles})
        modules = self._copy(others)
        rank, alpha = uniform(self.ranks, self.scalings)
        config.update(
            r=rank,
            lora_alpha=alpha,
            use_rslora=False,
            target_modules=sorted(modules) or None,
            target_parameters=sorted(self.ranks.keys() - modules),
        )
        config["rank_pattern"] = {
            re.escape(name): one for name, one in self.ranks.items() if one != rank
        }
        config["alpha_pattern"] = {
            re.escape(name): alpha_of(scaling, self.ranks[name])
            for name, scaling in self.scalings.items()
            if (scaling, self.ranks[name]) != (alpha / rank, rank)
        }
        return self.tensors

    def _fuse_module(self, module: str, roles: Mapping[str, Factors]) -> None:
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
                        f"{self.folder} has LoRA for the {role} projection of {module}."
                        f"{param.parameter_name} in the shape {seen} (experts, out, in), and the "
                        f"model's is {wanted}: use it with the model that it was trained on."
                    )
            if given and param.role == "gate_up":
                alternate = interleaved(self.model.get_submodule(param.module_name))
                pairs.append((param, _fuse(given.get("gate"), given.get("up"), alternate)))
            elif given:
                pairs.append((param, given[param.role]))
        for depth, (param, factors) in enumerate(reversed(pairs)):
            name = f"{module}.{param.parameter_name}"
            self.ranks[name], self.scalings[name] = factors.rank, factors.scaling
            path, (a, b) = PREFIX + module + ".base_layer" * depth, flat_factors(factors)
            self.tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}

    def _copy(self, keys: Iterable[str]) -> set[str]:
        """Copy the adapter's other tensors, under the model's names; return modules with LoRA."""
        # The model may have adapters already: their innermost modules come last and win
        inner = {unwrapped_name(name): one for name, one in self.model.named_modules()}
        own = dict.fromkeys(unwrapped_name(name) for name in self.model.state_dict())
        mapping: list[Any] = list(get_model_conversion_mapping(self.model))
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        prefix = getattr(self.model, "base_model_prefix", "")
        modules: set[str] = set()
        for key in keys:
            match = PAIR.match(key.removeprefix(PREFIX))
            if match is None:
                self.tensors[key] = self.file.read(key)
                continue
            path = match["path"]
            renamed, _ = rename_source_key(f"{path}.weight", renamings, converters, prefix, own)
            known = renamed.removesuffix(".weight") if renamed in own else path
            owner = inner.get(known)
            name = known if owner is None or isinstance(owner, LAYERS) else f"{known}.weight"
            if name == known:
                modules.add(name)
            self.ranks[name], self.scalings[name] = self.settings.rank_and_scaling(path)
            end = key.removeprefix(PREFIX)[len(path) :]
            self.tensors[PREFIX + known + end] = self.file.read(key)
        return modules

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
                f"{self.folder}: {next(iter(keys.values()))} is of LoRA for some experts only, or "
                f"not of one pair of factors of one shape for each ({len(read)} tensors), which "
                "one fused weight cannot hold: merge it instead."
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


def _fuse(gate: Factors | None, up: Factors | None, alternate: bool) -> Factors:
    one = gate or up
    assert one is not None
    gate = gate or Factors(one.a, torch.zeros_like(one.b), one.scaling)
    up = up or Factors(one.a, torch.zeros_like(one.b), one.scaling)
    b_up = up.b if up.scaling == gate.scaling else up.b.float() * (up.scaling / gate.scaling)
    dtype = torch.promote_types(gate.b.dtype, b_up.dtype)
    b_gate, b_up = gate.b.to(dtype), b_up.to(dtype)
    if gate.a.dtype == up.a.dtype and torch.equal(gate.a, up.a):
        return Factors(gate.a, joined(b_gate, b_up, alternate), gate.scaling)
    b_gate = nn.functional.pad(b_gate, (0, up.rank))
    b_up = nn.functional.pad(b_up, (gate.rank, 0))
    return Factors(torch.cat((gate.a, up.a), 1), joined(b_gate, b_up, alternate), gate.scaling)
