"""Tell which model types can hold fused experts, and the class that a user trains for each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .definitions import definitions

MODELS = Path(transformers.__file__).parent / "models"

# Heads in the order in which a model is most likely trained.
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "Model")


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
    folders = {module.split(".")[0] for module in definitions(MODELS)}
    known = sorted(CONFIG_MAPPING.keys())
    direct = {name for name in known if folder_of(CONFIG_MAPPING[name]) in folders}
    for name in known:
        if name in direct or any(part in direct for part in _parts(CONFIG_MAPPING[name])):
            yield name


def _parts(config_class: Any) -> Iterator[str]:
    """Yield model types of the parts that a composite configuration has by default."""
    if not getattr(config_class, "sub_configs", None):
        return
    try:
        default = config_class()
    except Exception:  # noqa: BLE001 - a configuration without defaults has no default parts
        return
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            yield getattr(part, "model_type", "")


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
    modules = [
        importlib.import_module(f"transformers.models.{entry}")
        for entry in definitions(MODELS)
        if entry.split(".")[0] == folder_of(config_class)
    ]
    own_classes = [
        item
        for module in modules
        for _, item in inspect.getmembers(module, inspect.isclass)
        if item.__module__ == module.__name__
        and issubclass(item, PreTrainedModel)
        and getattr(item, "config_class", None) is config_class
    ]
    for ending in _ENDINGS:
        for item in own_classes:
            if item.__name__.endswith(ending) and not item.__name__.endswith("PreTrainedModel"):
                return item
    return None
