"""Build what a person names as a model on the meta device.

MODEL is read as, in this order:

    a folder            that holds config.json
    a .json file        a configuration
    a .yml, .yaml file  of an axolotl-style trainer, of which `base_model` alone is read
    a model type        of transformers ("qwen3_moe"), in its default configuration
    a checkpoint        that model_registry/ has the configuration of ("qwen3-30b-a3b")
    a hub id            that is cached or can be reached; only its configuration is fetched

No weight is loaded or downloaded: the model is built from its configuration alone.
"""

from __future__ import annotations

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
import yaml
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from .. import registry
from ..errors import CheckpointError, MoeQloraError, did_you_mean
from ..packing.settings import CodecSettings
from .files import YAML, check_depth, check_no_codes_of_single_experts, place_of, read_json

_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForTextToWaveform",
    "AutoModel",
)


@dataclass(frozen=True)
class Source:
    """A model that a person named: what they typed, its configuration, and notes for them.

    `settings` say how experts are to be packed; None where nothing says so. `folder` is where the
    checkpoint lies; None without one.
    """

    label: str
    config: PretrainedConfig
    settings: CodecSettings | None = None
    notes: tuple[str, ...] = ()
    folder: Path | None = None


def resolve(
    model: str | Path | PretrainedConfig | Source, *, trust_remote_code: bool = False
) -> Source:
    """Find the configuration that `model` names, or is.

    One that is missing, damaged or unknown to transformers is a `CheckpointError`; quantization
    settings of its own that cannot be followed are a `ConfigError`.
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, PretrainedConfig):
        return _with_own_settings(Source(model.name_or_path or model.model_type, model))
    model = str(model)
    path = place_of(model)
    if path is None:
        return _from_name(model, trust_remote_code)
    if path.is_dir():
        check_no_adapter(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{model} is a folder without config.json; name a checkpoint.")
    elif path.suffix in YAML:
        return _from_yaml(model, path, trust_remote_code)
    source = _from_config(model, path, trust_remote_code)
    return replace(source, folder=path) if path.is_dir() else source


def check_no_adapter(folder: Path) -> None:
    """Raise a `CheckpointError` where a folder holds an adapter of PEFT's and no model."""
    file = folder / "adapter_config.json"
    if not file.is_file() or (folder / "config.json").exists():
        return
    try:
        base = read_json(file).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    name = f"its base ({base})" if base else "its base"
    raise CheckpointError(
        f"{folder} holds an adapter and no model: name {name}; moe-qlora merge checks and merges "
        "the two."
    )


def build(source: Source, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model of `source` on the meta device, in the dtype of its configuration.

    A configuration that transformers cannot build a model from is a `CheckpointError`; experts that
    bitsandbytes packed one by one are an `UnsupportedWeightError`.
    """
    model = _build(source, trust_remote_code)
    if source.folder is not None and source.settings is not None:
        names = [name for name, _ in model.named_parameters()]
        check_no_codes_of_single_experts(source.folder.glob("*.safetensors"), names)
    return model


def _build(source: Source, trust_remote_code: bool) -> nn.Module:
    config = source.config
    dtype = config.dtype or config.get_text_config().dtype or torch.bfloat16
    with torch.device("meta"), quiet():
        try:
            maker = _model_class(config)
            if maker is not None:
                return maker._from_config(config, dtype=dtype)
            remote = getattr(config, "auto_map", None) or {}
            for name in _AUTO_CLASSES:
                auto = getattr(transformers, name, None)
                if auto is None:
                    continue
                if type(config) in auto._model_mapping or (trust_remote_code and name in remote):
                    return auto.from_config(
                        config, dtype=dtype, trust_remote_code=trust_remote_code
                    )
        except MoeQloraError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{source.label}: transformers cannot build a model of type {config.model_type!r} "
                f"from this configuration ({type(error).__name__}: {_first_line(error)})."
            ) from error
    raise CheckpointError(
        f"transformers {transformers.__version__} has no model class for the type "
        f"{config.model_type!r}."
    )


def text_model(source: Source) -> Source | None:
    """Return what `AutoModelForCausalLM` loads of a multimodal checkpoint: its text model.

    None for other checkpoints, of which that is the model itself.
    """
    config = source.config
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        return None
    text = config.get_text_config()
    if text is config or known[type(config)].config_class is not type(text):
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


def _from_config(label: str, where: str | Path, trust_remote_code: bool) -> Source:
    if isinstance(where, Path):
        file = where / "config.json" if where.is_dir() else where
        if "model_type" not in read_json(file):
            raise CheckpointError(
                f"{label}: {file.name} names no model_type, so it is no transformers configuration."
            )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(str(where), trust_remote_code=trust_remote_code)
            check_depth(config.to_dict())
            _check_parts(config)
            # Kernels of the hub are code too, and nothing here computes.
            config._attn_implementation = config._experts_implementation = None
    except Exception as error:
        raise CheckpointError(_explain(label, error)) from error
    return _with_own_settings(Source(label, config))


def _check_parts(config: PretrainedConfig) -> None:
    """Raise where a part, such as text_config, is no configuration that transformers has read."""
    # get_text_config looks for these names in every configuration.
    for name in (*config.sub_configs, "text_config", "decoder", "generator", "text_encoder"):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, PretrainedConfig):
            raise ValueError(
                f"{name} is {part!r:.80}, which is no configuration of a part of a "
                f"{config.model_type}"
            )


def _with_own_settings(source: Source) -> Source:
    config = source.config
    notes = list(source.notes)
    if config.dtype is None and config.get_text_config().dtype is None:
        notes.append("The configuration states no dtype; sizes are for bfloat16.")
    own = getattr(config, "quantization_config", None)
    if own is None:  # Some makers say it of the text model.
        own = getattr(config.get_text_config(), "quantization_config", None)
    if own is None:
        return replace(source, notes=tuple(notes))
    own = own if isinstance(own, Mapping) else own.to_dict()
    method = own.get("quant_method") or "bitsandbytes"
    method = str(getattr(method, "value", method))  # an enumeration in a live configuration
    if method != "bitsandbytes":
        notes.append(f"The checkpoint is quantized with {method}; sizes are for plain weights.")
        return replace(source, notes=tuple(notes))
    return replace(source, settings=CodecSettings.from_config(own), notes=tuple(notes))


def _from_yaml(label: str, path: Path, trust_remote_code: bool) -> Source:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # a date with a 13th month is a ValueError
        raise CheckpointError(f"{label} is no readable YAML ({_first_line(error)}).") from error
    base = content.get("base_model") if isinstance(content, Mapping) else None
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{label} names no base_model; expected `base_model: FOLDER or ID`.")
    neighbour = path.parent / base
    name = str(neighbour) if not Path(base).exists() and neighbour.exists() else base
    if Path(name).suffix in YAML:
        raise CheckpointError(f"{label}: base_model is {base}, another YAML file; name a model.")
    source = resolve(name, trust_remote_code=trust_remote_code)
    return replace(source, label=label)


def _from_name(name: str, trust_remote_code: bool) -> Source:
    source = _from_model_type(name)
    if source is not None:
        return source
    known = registry.checkpoint_named(name)
    if known is not None:
        config_class = transformers.CONFIG_MAPPING[known.model_type]
        config = config_class(**{"dtype": torch.bfloat16, **copy.deepcopy(known.config)})
        return _with_own_settings(Source(known.name, config))
    if "/" not in name and (near := _near(name)):
        raise CheckpointError(f"{name} is no local path, model type or known checkpoint{near}.")
    return _from_config(name, name, trust_remote_code)


def _near(name: str) -> str:
    """Return what ` (did you mean ...?)` says of a name that nothing has, "" where nothing is."""
    starts = registry.near_checkpoints(name)
    if starts:
        return f" (did you mean {' or '.join(starts)}?)"
    full = [known.name for known in registry.checkpoints()]
    shorts = [each.partition("/")[2].lower() for each in full]
    return did_you_mean(name, [*registry.model_types(), *(full if "/" in name else shorts)])


def _from_model_type(model_type: str) -> Source | None:
    if model_type not in transformers.CONFIG_MAPPING:
        return None
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = [each.name for each in registry.checkpoints() if each.model_type == model_type]
    own = f"; {known[0]} has its own" if known else ""
    note = (
        f"{model_type} is a model type: sizes are those of its default configuration in "
        f"transformers, in bfloat16, and of no checkpoint{own}."
    )
    if model_type not in registry.model_types():
        return Source(model_type, config_class(), notes=(note,))
    entry = registry.load(model_type)
    if entry.published:
        return Source(model_type, config_class(**entry.published_config), notes=(note,))
    note = (
        f"{model_type} is a model type whose default configuration builds no model: sizes are "
        f"those of a tiny one, in bfloat16, and of no checkpoint{own}."
    )
    return Source(model_type, config_class(**entry.tiny_config), notes=(note,))


def _model_class(config: PretrainedConfig) -> Any:
    """Return the class that the configuration names, else the registry's; None without either."""
    names = list(config.architectures or ())
    if config.model_type in registry.model_types():
        names.append(registry.load(config.model_type).class_name)
    home = type(config).__module__
    if not home.startswith("transformers.models."):
        return None
    modeling = home.replace(".configuration_", ".modeling_")
    for name in names:
        candidate = getattr(transformers, name, None)
        if candidate is None and modeling != home:
            candidate = getattr(import_module(modeling), name, None)
        if isinstance(config, getattr(candidate, "config_class", None) or ()):
            return candidate
    return None


def _explain(label: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return (
            f"{label} brings its own model code; look at it, then pass --trust-remote-code to "
            "run it."
        )
    if "does not recognize this architecture" in text:
        return (
            f"{label}: transformers {transformers.__version__} does not know its model_type, and "
            "the checkpoint brings no code of its own."
        )
    if isinstance(error, OSError):
        return (
            f"{label} is no local path, model type or known checkpoint{_near(label)}, and "
            f"{_why_not_from_hub(text)}"
        )
    return f"{label}: its configuration cannot be read ({_first_line(error)})"


def _why_not_from_hub(text: str) -> str:
    """Return the rest of the sentence about a configuration that transformers did not get."""
    if huggingface_hub.is_offline_mode():
        return (
            "its configuration is neither cached nor to be had from the hub: this process is "
            "offline (HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE, is set)."
        )
    if "gated" in text:
        return "the hub gives it to those only who asked on its page and logged in (hf auth login)."
    if "is not a valid model identifier" in text or "404" in text:
        return "the hub has none of this name that it shows you (a private one needs a login)."
    return "the hub, which may have its configuration, cannot be reached: check the network."


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__
