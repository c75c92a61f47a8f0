"""`ExpertsHost`: packed experts for authors of loaders, one method for each step.

    host = ExpertsHost(yaml.get("moe_qlora"))        # settings checked: one sentence if wrong
    with host.loading():                             # before the build; off again on any way out
        model = build_model(...)                     # from_pretrained with a BitsAndBytesConfig
    host.after_build(model)                          # everything is packed, or one clear error
    config = host.before_peft(model, lora_config)    # a new LoraConfig; the caller's is untouched
    peft_model = peft.get_peft_model(model, config)
    host.after_peft(peft_model)                      # connected and checked
    host.before_training(peft_model, batch_size=1, seq_len=4096)    # where the settings ask for it
    ...                                              # train, and save_pretrained as ever
    host.merge(base, adapter, out)                   # a plain checkpoint, as it was trained

A loader with hooks calls `before_build` and, on every way out, `after_build` or `close`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..errors import AdapterError, CheckpointError, ConfigError, DetectionError, QuantizationError
from .settings import ExpertsSettings

_log = logging.getLogger(__name__)
_NAMES = ("target_parameters", "exclude_modules")  # PEFT narrows target_modules to what it finds

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from ..checkpoint.merge import MergeReport
    from ..layout import ModelLayout
    from ..planning.step import Loss
    from ..quantize import QuantizationReport
    from ..train.prepare import PreparedTraining


class ExpertsHost:
    """Packed experts for one run of a loader; as a context manager it closes itself."""

    def __init__(self, settings: ExpertsSettings | Mapping[str, Any] | None = None) -> None:
        self.settings = ExpertsSettings.read(settings)
        self._switch = ExitStack()
        self._adapted: PeftConfig | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check_model(
        self, model: str | Path | PretrainedConfig, *, trust_remote_code: bool = False
    ) -> None:
        """Refuse a model without fused experts, or without a role that gets LoRA, before its load.

        One that cannot be built on meta is left to `after_build`.
        """
        if not self.settings.pack_experts:
            return
        from ..models import named

        try:
            source = named.resolve(model, trust_remote_code=trust_remote_code)
            built = named.build(source, trust_remote_code=trust_remote_code)
        except CheckpointError:
            return
        layout, wanted = _layout_of(built), self.settings.lora_experts
        roles = sorted({param.role for param in layout})
        if unknown := sorted({*([] if isinstance(wanted, bool) else wanted)} - {*roles}):
            raise ConfigError(
                f"moe_qlora.lora_experts holds {unknown[0]!r}, and the experts of this "
                f"{layout.model_type} model have the roles {', '.join(roles)}: name one of these."
            )

    def before_build(self, quantization_config: Any = None) -> None:
        """Pack experts in `from_pretrained` until `after_build` or `close`; check the config."""
        self.close()
        if not self.settings.pack_experts:
            return
        from ..hf import switch
        from ..packing.settings import CodecSettings

        if quantization_config is not None:
            CodecSettings.from_config(quantization_config)
        self._switch.enter_context(switch.enabled(skip_modules=self.settings.skip_modules))

    @contextmanager
    def loading(self, quantization_config: Any = None) -> Iterator[None]:
        """Call `before_build` for a block, and undo it at any end."""
        self.before_build(quantization_config)
        try:
            yield
        finally:
            self._switch.close()

    def after_build(
        self, model: nn.Module, quantization_config: Any = None, *, pack: bool = False
    ) -> QuantizationReport | None:
        """Check that every expert weight of a model is packed, or with `pack` pack the others now.

        `quantization_config=None` is the model's own. A model without experts is a
        `DetectionError`, one loaded in 16 bit a `ConfigError`; a `QuantizationError` names weights
        that are not packed.
        """
        self._switch.close()
        if not self.settings.pack_experts:
            return None
        from ..lora.targets import base_model
        from ..packing.selection import weights_to_pack
        from ..packing.settings import CodecSettings
        from ..quantize import quantize_experts

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
            names = ", ".join(f"{param.name} {tuple(param.shape)}" for param in unpacked)
            raise QuantizationError(
                f"{len(unpacked)} of {len(layout)} expert weights are not packed: {names}; load "
                "the model by from_pretrained in ExpertsHost.loading(), name them in skip_modules "
                "to keep them in 16 bit, or pack them now with after_build(pack=True)."
            )
        return quantize_experts(model, config, progress=bool(unpacked) and self.settings.progress)

    def before_peft(self, model: nn.Module, lora_config: PeftConfig) -> PeftConfig:
        """Return a new config for this model, with LoRA on experts and routers as settings say.

        A loader that makes its own `LoraConfig` takes lists of targets from it, and
        `lora_dropout=0` if experts get LoRA: `after_peft` sets the dropout.
        """
        from ..lora.config import adapt_lora_config

        experts, router = self.settings.lora_experts, self.settings.lora_router
        self._adapted = adapt_lora_config(model, lora_config, experts=experts, router=router)
        return self._adapted

    def after_peft(self, peft_model: PeftModel) -> PeftModel:
        """Connect stock PEFT's LoRA on packed experts; LoRA without effect is an error."""
        configs, wanted = getattr(peft_model, "peft_config", None), self.settings.lora_experts
        if not configs or not hasattr(peft_model, "base_model"):
            if wanted:
                seen = f"lora_experts is {wanted!r} and the {type(peft_model).__name__}"
                raise AdapterError(f"{seen} has no adapter: make it with PEFT first.")
            return peft_model
        from ..lora.config import AdaptedLoraConfig
        from ..lora.model import connect_adapters, set_dropout
        from ..lora.targets import expert_parameters, names_parameter, same_names

        connect_adapters(peft_model)
        adapted: Any = self._adapted
        dropout = getattr(adapted, "lora_dropout", 0.0)
        for adapter, config in configs.items():
            both = isinstance(config, AdaptedLoraConfig) and isinstance(adapted, AdaptedLoraConfig)
            if both and same_names(config, adapted, _NAMES):
                config._callers = adapted._callers  # For files: not lists that a loader made
            if dropout:
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
        from ..train.prepare import prepare_training

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
        from ..checkpoint.merge import merge_adapter

        options = {"like_training": True, "progress": self.settings.progress} | options
        return merge_adapter(base, adapter, out, **options)

    def close(self) -> None:
        """Undo `before_build`, and forget the adapted config."""
        self._switch.close()
        self._adapted = None


def _layout_of(model: nn.Module) -> ModelLayout:
    from ..detection.detect import detect

    layout = detect(model)
    if layout:
        return layout
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    why = f"This {kind} model holds no fused expert weights, so there is nothing to pack"
    if layout.linear_experts:
        why = f"The experts of this {kind} model are Linear layers, which bitsandbytes packs itself"
    raise DetectionError(f"{why}: leave moe_qlora out, or set moe_qlora.pack_experts to false.")


_PAIRS = ("dpo", "ipo", "orpo", "simpo", "cpo", "rm")


def loss_of(objective: str) -> Loss | None:
    """Return the memory of an objective's loss, for `prepare_training`; None: the model's own.

    Preference losses and policy gradients read the probability of each token: loaders' trainers
    keep the logits of all tokens for it. Unknown objectives have no reference.
    """
    if objective in ("sft", "pt", "rm"):  # the model's own loss, or one number a sequence
        return None
    import torch
    from torch.nn import functional as F

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
