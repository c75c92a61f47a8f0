"""Build a named model on the meta device, from its configuration alone.

A name is, in this order: a folder with config.json; a .json file; a model type of transformers
("qwen3_moe"), in its default configuration; a checkpoint of model_registry/ ("qwen3-30b-a3b"); a
hub id.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from .. import registry
from ..errors import CheckpointError, MoeQloraError, did_you_mean
from ..packing.settings import CodecSettings
from .files import check_depth, check_no_codes_of_single_experts, place_of, read_json

_TASKS = (
    "ForCausalLM", "ForImageTextToText", "ForMultimodalLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq",
    "ForMaskedLM", "ForTextToWaveform", "",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A model that a person named, and sentences for them."""

    label: str  # as they typed it
    config: PretrainedConfig
    settings: CodecSettings | None = None  # of its own quantization_config
    notes: tuple[str, ...] = ()
    folder: Path | None = None  # of the checkpoint


def resolve(
    model: str | Path | PretrainedConfig | Source, *, trust_remote_code: bool = False
) -> Source:
    """Find the configuration of a named model; errors of this package say why not."""
    if isinstance(model, Source):
        return model
    if isinstance(model, PretrainedConfig):
        return _with_own_settings(model.name_or_path or model.model_type, model)
    model = str(model)
    path = place_of(model)
    if path is None:
        return _from_name(model, trust_remote_code)
    check_no_adapter(path)
    file = path / "config.json" if path.is_dir() else path
    if "model_type" not in read_json(file):
        raise CheckpointError(f"{model}: {file.name} names no model_type of transformers.")
    source = _read(model, str(path), trust_remote_code)
    return replace(source, folder=path) if path.is_dir() else source


def check_no_adapter(folder: Path) -> None:
    """Raise a `CheckpointError` for a folder that holds an adapter of PEFT's and no model."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} holds an adapter and no model: name its base; moe-qlora merge checks and "
            "merges the two."
        )


def build(source: Source, *, trust_remote_code: bool = False) -> nn.Module:
    """Build a model on the meta device, in the dtype of its configuration.

    A `CheckpointError` or `UnsupportedWeightError` says why not.
    """
    config = source.config
    dtype = config.dtype or config.get_text_config().dtype or torch.bfloat16
    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    how: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = None
    with torch.device("meta"), quiet():
        try:
            if (maker := _model_class(config)) is not None:
                model = maker._from_config(config, dtype=dtype)
            for name in (f"AutoModel{task}" for task in _TASKS) if model is None else ():
                auto = getattr(transformers, name, None)  # some are newer than others
                if auto is not None and (type(config) in auto._model_mapping or name in remote):
                    model = auto.from_config(config, **how)
                    break
        except MoeQloraError:
            raise
        except Exception as error:
            why = f"from this configuration ({type(error).__name__}: {_first_lines(error)})"
            what = f"transformers cannot build a model of type {config.model_type!r}"
            raise CheckpointError(f"{source.label}: {what} {why}.") from error
    if model is None:
        version, kind = transformers.__version__, config.model_type
        raise CheckpointError(f"transformers {version} has no model class for the type {kind!r}.")
    if source.folder is not None and source.settings is not None:
        names = [name for name, _ in model.named_parameters()]
        check_no_codes_of_single_experts(source.folder.glob("*.safetensors"), names)
    return model


def text_model(source: Source) -> Source | None:
    """Return the text model of a multimodal checkpoint, which `AutoModelForCausalLM` loads."""
    config, text = source.config, source.config.get_text_config()
    known = transformers.AutoModelForCausalLM._model_mapping
    if text is config or type(config) not in known:
        return None
    if known[type(config)].config_class is not type(text):
        return None
    text.dtype = text.dtype or config.dtype
    return replace(source, config=text)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' advice about models only looked at off the terminal."""
    loggers = transformers.logging, huggingface_hub.logging
    before = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.set_verbosity(level)


def _read(label: str, where: str, trust_remote_code: bool) -> Source:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
            check_depth(config.to_dict())
            # get_text_config looks for these names in every configuration.
            parts = {"text_config", "decoder", "generator", "text_encoder", *config.sub_configs}
            for name in sorted(parts):
                part = getattr(config, name, None)
                if part is not None and not isinstance(part, PretrainedConfig):
                    raise ValueError(f"{name} is {part!r:.80}, which is no configuration")
            # Kernels of the hub are code too, and nothing here computes.
            config._attn_implementation = config._experts_implementation = None
    except Exception as error:
        raise CheckpointError(_explain(label, error)) from error
    return _with_own_settings(label, config)


def _with_own_settings(label: str, config: PretrainedConfig, *notes: str) -> Source:
    text = config.get_text_config()
    if config.dtype is None and text.dtype is None:
        notes += ("The configuration states no dtype; sizes are for bfloat16.",)
    # Some publishers say it of the text model.
    own = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if own is None:
        return Source(label, config, notes=notes)
    own = own if isinstance(own, Mapping) else own.to_dict()
    method = own.get("quant_method") or "bitsandbytes"
    method = str(getattr(method, "value", method))  # an enumeration in a live configuration
    if method == "bitsandbytes":
        return Source(label, config, CodecSettings.from_config(own), notes)
    notes += (f"The checkpoint is quantized with {method}; sizes are for plain weights.",)
    return Source(label, config, notes=notes)


def _from_name(name: str, trust_remote_code: bool) -> Source:
    if name in transformers.CONFIG_MAPPING:
        default: Mapping[str, Any] = {}
        what = "its default configuration in transformers"
        if name in registry.model_types():
            entry = registry.load(name)
            default = entry.published_config if entry.published else entry.tiny_config
            what = what if entry.published else "a tiny configuration: its default builds no model"
            what += "".join(f"; {one} has its own" for one in [*entry.checkpoints][:1])
        note = f"{name} is a model type, in bfloat16: sizes are those of {what}."
        return Source(name, transformers.CONFIG_MAPPING[name](**default), notes=(note,))
    if (known := registry.checkpoint_named(name)) is not None:
        fields = {"dtype": torch.bfloat16, **copy.deepcopy(known.config)}
        config = transformers.CONFIG_MAPPING[known.model_type](**fields)
        return _with_own_settings(known.name, config)
    if "/" not in name and (near := _near(name)):
        raise CheckpointError(f"{name} is no local path, model type or known checkpoint{near}.")
    return _read(name, name, trust_remote_code)


def _near(name: str) -> str:
    names = [known.name if "/" in name else known.short for known in registry.checkpoints()]
    return did_you_mean(name, [*registry.model_types(), *names])


def _model_class(config: PretrainedConfig) -> Any:
    """Return the class that the configuration names, else the registry's; None without either."""
    names, home = list(config.architectures or ()), type(config).__module__
    if config.model_type in registry.model_types():
        names.append(registry.load(config.model_type).class_name)
    if not home.startswith("transformers.models."):
        return None
    for name in names:
        candidate = getattr(transformers, name, None)
        if candidate is None and ".configuration_" in home:
            modeling = import_module(home.replace(".configuration_", ".modeling_"))
            candidate = getattr(modeling, name, None)
        if isinstance(config, getattr(candidate, "config_class", None) or ()):
            return candidate
    return None


def _explain(label: str, error: Exception) -> str:
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return f"{label} brings its own model code; read it, then pass --trust-remote-code."
    if not isinstance(error, OSError):
        return f"{label}: its configuration cannot be read ({_first_lines(error)})."
    why = f"the hub did not give its configuration ({_first_lines(error)})"
    if huggingface_hub.is_offline_mode():
        why = "this process is offline (HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE, is set)"
    return f"{label} is no local path, model type or known checkpoint{_near(label)}, and {why}."


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__
