"""`ExpertsHost`: packed experts for authors of loaders, one method for each step.

    host = ExpertsHost(yaml.get("moe_qlora"))
    with host.loading():
        model = build_model(...)                     # from_pretrained with a BitsAndBytesConfig
    host.after_build(model)
    config = host.before_peft(model, lora_config)
    peft_model = host.after_peft(peft.get_peft_model(model, config))
    host.before_training(peft_model, batch_size=1, seq_len=4096)
    ...                                              # train, and save_pretrained as ever
    host.merge(base, adapter, out)

A loader with hooks calls `before_build` and, on every way out, `after_build` or `close`.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..checkpoint.merge import MergeReport, merge_adapter
from ..detection.detect import detect
from ..errors import AdapterError, CheckpointError, ConfigError, DetectionError, QuantizationError
from ..hf import switch
from ..layout import ModelLayout, base_model
from ..lora.config import AdaptedLoraConfig, adapt_lora_config
from ..lora.model import connect_adapters, set_dropout
from ..lora.targets import expert_parameters, names_parameter, same_names
from ..models import named
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from ..planning.step import Loss
from ..quantize import QuantizationReport, quantize_experts
from ..train.prepare import PreparedTraining, prepare_training
from .settings import ExpertsSettings

_log = logging.getLogger(__name__)
_NAMES = ("target_parameters", "exclude_modules")  # PEFT narrows target_modules to what it finds
_PAIRS = ("dpo", "ipo", "orpo", "simpo", "cpo", "rm")


class ExpertsHost:
    """Packed experts for one run of a loader; as a context manager it closes itself."""

    def __init__(self, settings: ExpertsSettings | Mapping[str, Any] | None = None) -> None:
        self.settings = ExpertsSettings.read(settings)
        self._switch = ExitStack()
        self._adapted: PeftConfig | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_model(
        self, model: str | Path | PretrainedConfig, *, trust_remote_code: bool = False
    ) -> None:
        """Refuse a model without fused experts, or without a role that gets LoRA, before a load."""
        if not self.settings.pack_experts:
            return
        try:
            source = named.resolve(model, trust_remote_code=trust_remote_code)
            built = named.build(source, trust_remote_code=trust_remote_code)
        except CheckpointError:
            return  # its loader, or `after_build`, says more
        layout, wanted = _layout_of(built), self.settings.lora_experts
        roles = {param.role for param in layout}
        if not isinstance(wanted, bool) and not roles.issuperset(wanted):
            raise ConfigError(
                f"moe_qlora.lora_experts is {list(wanted)}, and the experts of this "
                f"{layout.model_type} model have the roles {', '.join(sorted(roles))}: name these."
            )

    def before_build(self, quantization_config: Any = None) -> None:
        """Pack experts in `from_pretrained` until `after_build` or `close`; check the config."""
        self.close()
        if self.settings.pack_experts:
            if quantization_config is not None:
                CodecSettings.from_config(quantization_config)
            self._switch.enter_context(switch.enabled(skip_modules=self.settings.skip_modules))

    @contextmanager
    def loading(self, quantization_config: Any = None) -> Iterator[None]:
        """Call `before_build` for a block, and undo it at any end."""
        self.before_build(quantization_config)
        with self._switch:
            yield

    def after_build(
        self, model: nn.Module, quantization_config: Any = None, *, pack: bool = False
    ) -> QuantizationReport | None:
        """Check that every expert weight of a model is packed, or with `pack` pack the others now.

        A model without experts is a `DetectionError`, one loaded in 16 bit a `ConfigError`; a
        `QuantizationError` names weights that are not packed.
        """
        self._switch.close()
        if not self.settings.pack_experts:
            return None
        model = base_model(model)
        layout, config = _layout_of(model), quantization_config
        if config is None:
            config = getattr(getattr(model, "config", None), "quantization_config", None)
        if config is None:
            raise ConfigError(
                f"This {type(model).__name__} was loaded without a BitsAndBytesConfig, so nothing "
                "says how to pack its experts: load it in 4 bit (load_in_4bit: true) or 8 bit."
            )
        fields = config if isinstance(config, Mapping) else config.to_dict()
        skips = fields.get("llm_int8_skip_modules") or ()
        if more := [each for each in self.settings.skip_modules if each not in skips]:
            config = {**fields, "llm_int8_skip_modules": [*skips, *more]}
        unpacked = weights_to_pack(model, layout, CodecSettings.from_config(config))
        if unpacked and not pack:
            names = ", ".join(param.name for param in unpacked)
            raise QuantizationError(
                f"{len(unpacked)} of {len(layout)} expert weights are not packed: {names}; load "
                "the model in ExpertsHost.loading(), or pack them now with after_build(pack=True)."
            )
        return quantize_experts(model, config, progress=bool(unpacked) and self.settings.progress)

    def before_peft(self, model: nn.Module, lora_config: PeftConfig) -> PeftConfig:
        """Return a new config for this model, with LoRA on experts and routers as settings say.

        A loader that makes its own `LoraConfig` takes lists of targets from it, and
        `lora_dropout=0` if experts get LoRA: `after_peft` sets the dropout.
        """
        experts, router = self.settings.lora_experts, self.settings.lora_router
        self._adapted = adapt_lora_config(model, lora_config, experts=experts, router=router)
        return self._adapted

    def after_peft(self, peft_model: PeftModel) -> PeftModel:
        """Connect stock PEFT's LoRA on packed experts; LoRA without effect is an error."""
        configs, wanted = getattr(peft_model, "peft_config", None), self.settings.lora_experts
        if not configs or not hasattr(peft_model, "base_model"):
            if wanted:
                raise AdapterError("lora_experts is set, and the model has no adapter: make it.")
            return peft_model
        connect_adapters(peft_model)
        adapted: Any = self._adapted
        for adapter, config in configs.items():
            both = isinstance(config, AdaptedLoraConfig) and isinstance(adapted, AdaptedLoraConfig)
            if both and same_names(config, adapted, _NAMES):
                config._callers = adapted._callers  # For files: not lists that a loader made
            if dropout := getattr(adapted, "lora_dropout", 0.0):
                set_dropout(peft_model, adapter, dropout)
            targets = getattr(config, "target_parameters", None) or ()
            for name in expert_parameters(peft_model, wanted) if wanted else ():
                if not any(names_parameter(target, name) for target in targets):
                    raise AdapterError(
                        f"moe_qlora.lora_experts asks for LoRA on {name}, and adapter {adapter!r} "
                        "was made without it: make it with the config from ExpertsHost.before_peft."
                    )
        return peft_model

    def before_training(
        self, model: nn.Module, *, batch_size: int, seq_len: int, objective: str = "sft"
    ) -> PreparedTraining | None:
        """Call `moe_qlora.prepare_training` on a model with adapters, unless settings say not to.

        `batch_size` are rows in a forward of one device, two sequences each if `objective` compares
        pairs ("dpo", "ipo", "orpo", "simpo", "cpo", "rm"). A step that does not fit is a
        `ConfigError` if the settings ask for this, else a warning.
        """
        asked = self.settings.prepare_training
        if asked is False:
            return None
        rows, memory = batch_size * (1 + (objective in _PAIRS)), None if asked is True else asked
        how: dict[str, Any] = {"seq_len": seq_len, "memory": memory, "loss": loss_of(objective)}
        try:
            return prepare_training(model, batch_size=rows, **how)
        except ConfigError as error:
            if asked is not None:
                raise
            _log.warning("moe_qlora.prepare_training is not used: %s", error)
            return None

    def merge(
        self, base: str | Path, adapter: str | Path, out: str | Path, **options: Any
    ) -> MergeReport:
        """Call `moe_qlora.merge_adapter` with `like_training=True`, and any options over that."""
        options = {"like_training": True, "progress": self.settings.progress} | options
        return merge_adapter(base, adapter, out, **options)

    def close(self) -> None:
        """Undo `before_build`, and forget the adapted config."""
        self._switch.close()
        self._adapted = None


def _layout_of(model: nn.Module) -> ModelLayout:
    if layout := detect(model):
        return layout
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    linear = ", but experts of Linear layers, which bitsandbytes packs"
    linear *= bool(layout.linear_experts)
    raise DetectionError(
        f"This {kind} model holds no fused expert weights{linear}: leave moe_qlora out, or set "
        "moe_qlora.pack_experts to false."
    )


def loss_of(objective: str) -> Loss | None:
    """Return a loss that keeps the logits that an objective's trainer keeps; None: the model's."""
    if objective in ("sft", "pt", "rm"):  # the model's own loss, or one number a sequence
        return None

    def mean(model: Any, batch: dict[str, Any]) -> Tensor:
        # Of the log-probabilities, row by row, as TRL's `selective_log_softmax` for 16 bit.
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        rows = zip(model(**inputs).logits[:, :-1], batch["labels"][:, 1:], strict=True)
        found = [-F.cross_entropy(a.float(), b, reduction="none") for a, b in rows]
        return torch.stack(found).mean()

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        policy = mean(model, batch)
        if objective not in ("dpo", "ipo", "kto"):
            return policy
        # While the policy's activations are alive, as in TRL 1.9.
        with torch.no_grad(), getattr(model, "disable_adapter", nullcontext)():
            reference = mean(model, batch)
        return policy - reference

    return loss
