"""Tell from transformers' own source, without running any model, which types have fused experts.

An experts class is one that transformers decorates with `use_experts_implementation`, or one whose
`__init__` makes an `nn.Parameter` of three or more dimensions whose first is written as a number
of experts, or one of the few in `UNUSUAL` whose shape hides what it is.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .tiny import default_of

MODELS = Path(transformers.__file__).parent / "models"
DECORATOR = "use_experts_implementation"

# Heads in the order in which a model is most likely trained.
_MAPPINGS = (
    *("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    *("MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    *("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "MODEL_MAPPING"),
)
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "Model")


@dataclass(frozen=True)
class Definition:
    """One experts class, as its source describes it."""

    weights: tuple[str, ...]  # Parameters that stack expert matrices, in the source's order
    biases: tuple[str, ...]  # Parameters that hold one vector for each expert
    transposed: bool  # (E, in, out)
    dispatches: bool  # Whether it goes through transformers' experts interface
    packed_rows: bool = False  # Whether experts lie one below the other in a 2-D parameter
    roles: Mapping[str, str] = field(default_factory=dict)  # Of weights whose names do not tell


# Classes that neither the decorator nor the rule on the first dimension describes in full.
UNUSUAL: dict[str, dict[str, Any]] = {
    # (E * ffn, hidden): `w2` is used as it lies, `w1` and `v1` transposed.
    "DbrxExpertGLU": {
        "weights": ("w1", "v1", "w2"),
        "packed_rows": True,
        "roles": {"w1": "gate", "v1": "up", "w2": "down"},
    },
    # One weight on each module: what it does is told by the name that its owner gives the module.
    "JetMoeParallelExperts": {"weights": ("weight",)},
    # Computes `input @ weight` and says so nowhere.
    "Llama4TextExperts": {"transposed": True},
}


def _parameters(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """Yield name and sizes of every `self.<name> = nn.Parameter(torch.<make>(sizes...))`."""
    for item in ast.walk(node):
        match item:
            case ast.Assign(
                targets=[ast.Attribute(attr=name), *_],
                value=ast.Call(func=made, args=[ast.Call(args=sizes), *_]),
            ) if ast.unparse(made).endswith("Parameter"):
                match sizes:
                    case [ast.Tuple(elts=inner) | ast.List(elts=inner)]:
                        sizes = inner
                yield name, [ast.unparse(size) for size in sizes]


def _definition(node: ast.ClassDef) -> Definition | None:
    flags: dict[str, str] | None = None
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if ast.unparse(call.func if call else decorator).endswith(DECORATOR):
            keywords = call.keywords if call else []
            flags = {str(one.arg): ast.unparse(one.value) for one in keywords}
    parameters = list(_parameters(node))
    known: dict[str, Any] = {
        "weights": tuple(
            name
            for name, sizes in parameters
            if len(sizes) >= 3 and (flags is not None or "experts" in sizes[0])
        ),
        "transposed": (flags or {}).get("is_transposed") == "True",
        "dispatches": flags is not None,
    } | UNUSUAL.get(node.name, {})
    rest = [name for name, sizes in parameters if name not in known["weights"] and len(sizes) == 2]
    return Definition(biases=tuple(rest), **known) if known["weights"] else None


@cache
def definitions() -> dict[str, dict[str, Definition]]:
    """Return every experts class under transformers' `models`: module -> class -> definition."""
    by_module: dict[str, dict[str, Definition]] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "xpert" in text else ():
            if isinstance(node, ast.ClassDef) and (entry := _definition(node)) is not None:
                by_module.setdefault(f"{path.parent.name}.{path.stem}", {})[node.name] = entry
    return by_module


def definition_of(module: object) -> Definition | None:
    """Return the definition of a live module's class, or of the nearest base that has one."""
    for base in type(module).__mro__:
        folder = ".".join(base.__module__.split(".")[-2:])
        if entry := definitions().get(folder, {}).get(base.__name__):
            return entry
    return None


def folder_of(config_class: type) -> str:
    """Return the folder under models/ with a configuration's modeling code.

    Its own, a base's, or that of the class which the auto mappings have for it, as of sarvam_moe.
    """
    classes = chain(config_class.__mro__, _mapped(config_class))
    modules = (one.__module__.split(".") for one in classes)
    folders = (parts[-2] for parts in modules if parts[:2] == ["transformers", "models"])
    own = config_class.__module__.split(".")[-2]
    return next((f for f in folders if any((MODELS / f).glob("modeling_*.py"))), own)


def candidates() -> Iterator[str]:
    """Yield model types whose own folder, or a part's, defines an experts class."""
    folders = {module.split(".")[0] for module in definitions()}
    known = sorted(CONFIG_MAPPING.keys())
    direct = {name for name in known if folder_of(CONFIG_MAPPING[name]) in folders}
    for name in known:
        whole, names = CONFIG_MAPPING[name], getattr(CONFIG_MAPPING[name], "sub_configs", None)
        parts = [getattr(default_of(whole), part, None) for part in names or ()]
        if name in direct or any(getattr(part, "model_type", "") in direct for part in parts):
            yield name


def _mapped(config_class: Any) -> Iterator[type[PreTrainedModel]]:
    composite = "text_config" in (getattr(config_class, "sub_configs", None) or {})
    for name in _MAPPINGS[1:] + _MAPPINGS[:1] if composite else _MAPPINGS:
        mapping = getattr(modeling_auto, name, None)
        if mapping is not None and config_class in mapping:
            classes = mapping[config_class]
            yield classes[0] if isinstance(classes, tuple) else classes


def model_class(config_class: Any) -> type[PreTrainedModel] | None:
    """Return the class to build: from the auto mappings, else from the configuration's module."""
    for found in _mapped(config_class):
        return found
    folder = folder_of(config_class)
    entries = [entry for entry in definitions() if entry.split(".")[0] == folder]
    modules = [importlib.import_module(f"transformers.models.{entry}") for entry in entries]
    own_classes = [
        item
        for module in modules
        for _, item in inspect.getmembers(module, inspect.isclass)
        if item.__module__ == module.__name__
        and issubclass(item, PreTrainedModel)
        and getattr(item, "config_class", None) is config_class
        and not item.__name__.endswith("PreTrainedModel")
    ]
    found_by = [[item for item in own_classes if item.__name__.endswith(e)] for e in _ENDINGS]
    return next((items[0] for items in found_by if items), None)
