"""The axolotl plugin: packed experts and LoRA on them, from the YAML file alone.

    plugins:
      - moe_qlora.integrations.axolotl.MoeQloraPlugin
    moe_qlora:
      lora_experts: true

The hooks are in the order of their calls. axolotl keeps a plugin for the whole process: `host` is
there only in a run that names the plugin.
"""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, model_validator

from ..errors import ConfigError
from .host import ExpertsHost
from .settings import BLOCK, ExpertsSettings, check, is_named, wants_packing

LOG = get_logger("axolotl.plugins.moe_qlora")  # a child of the logger that axolotl shows

# Fields set for PEFT, and restored once the adapters exist.
_TARGETS = ("lora_target_modules", "lora_target_parameters", "lora_exclude_modules")
_WRITTEN = (*_TARGETS, "lora_target_linear", "lora_dropout")
_CONFIG_ONLY = ("dpo", "ipo", "kto")  # whose trainers make the adapters
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


class MoeQloraArgs(BaseModel):
    """The fields that the plugin adds to axolotl's schema."""

    moe_qlora: ExpertsSettings | None = None
    lora_exclude_modules: str | list[str] | None = None  # read by axolotl's loader

    @model_validator(mode="before")
    @classmethod
    def _other_runs(cls, data: Any) -> Any:
        # axolotl calls every plugin that it has loaded in the process
        if isinstance(data, Mapping) and not is_named(data):
            return {key: data[key] for key in data if key not in MoeQloraArgs.model_fields}
        return data


class MoeQloraPlugin(BasePlugin):
    """Packs experts while axolotl loads a model, and trains LoRA on them."""

    def __init__(self) -> None:
        super().__init__()
        self.host: ExpertsHost | None = None  # of the current run
        self._written = ExitStack()  # restores the user's values in the configuration
        self._undo = ExitStack()

    def register(self, cfg: Any) -> None:
        self._leave()
        check(cfg)

    def on_config_validation_error(self, cfg: Any) -> None:
        self._leave()

    def get_input_args(self) -> str:
        return f"{__name__}.{MoeQloraArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse a model without the requested experts; otherwise pack them during the build."""
        self._leave()
        if not is_named(cfg) or cfg.get("merge_lora"):
            return
        self.host = host = ExpertsHost(cfg.get(BLOCK))
        if not wants_packing(cfg):
            return
        host.check_model(cfg["base_model"], trust_remote_code=bool(cfg.get("trust_remote_code")))
        host.before_build()  # until post_model_build, or the next run after a build that fails

    def post_model_build(self, cfg: Any, model: Any) -> None:
        if self.host is None:
            return
        report = self.host.after_build(model)
        if report is not None:
            LOG.info("%s", report)
            # axolotl's k-bit preparation would cast 16-bit weights to fp32
            model._moe_experts_quantized = True

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        """Set the fields for PEFT on experts, until `post_lora_load`."""
        if self.host is None or not (cfg.get("adapter") and wants_packing(cfg)):
            return
        if cfg.get("experts_implementation"):  # set on the model since the build
            self.host.after_build(model)
        if cfg.get("lora_model_dir") and _loss_of(cfg) not in _CONFIG_ONLY:
            return  # The saved adapter has its own configuration
        from axolotl.loaders.adapter import _build_peft_lora_config

        asked: Any = _build_peft_lora_config(model, cfg)
        if cfg.get("lora_target_linear") and not cfg.get("lora_target_modules"):
            # axolotl's own list contains routers, some of which LoRA layers cannot replace
            asked.target_modules = "all-linear"
        adapted: Any = self.host.before_peft(model, asked)
        users = {key: cfg[key] for key in _WRITTEN if cfg.get(key) is not None}
        for key in _WRITTEN:
            self._written.callback(_put_back, cfg, key, users)
        for key in _TARGETS:  # The schema wants lists; a regex or None stays
            names = getattr(adapted, key.removeprefix("lora_"))
            cfg[key] = sorted(names) if isinstance(names, (set, frozenset)) else names
        cfg["lora_target_linear"] = None  # its layers are among the modules now
        if adapted.target_parameters:
            # PEFT's own layer for parameters refuses it; set on the layers once they are there
            cfg["lora_dropout"] = 0.0

    def post_lora_load(self, cfg: Any, model: Any) -> None:
        self._written.close()
        # DPO, IPO and KTO have no adapter yet: see `post_trainer_create`.
        if self.host is None or not hasattr(model, "peft_config"):
            return
        self.host.after_peft(model)
        if cfg.get("lora_model_dir") and cfg.get("lora_dropout"):  # which its files do not carry
            from ..lora.model import set_dropout

            set_dropout(model, model.active_adapter, cfg["lora_dropout"])

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Connect adapters that a trainer has made itself (DPO, IPO, KTO); prepare training."""
        if self.host is None:
            return
        model = self.host.after_peft(trainer.model)
        if _loss_of(cfg) in _CONFIG_ONLY and hasattr(model, "get_base_model"):
            # At the end axolotl saves the loaded model; redirect it to the trainer's PeftModel.
            base: Any = model.get_base_model()
            self._undo.callback(_put_back, vars(base), "save_pretrained", dict(vars(base)))
            base.save_pretrained = model.save_pretrained
        if cfg.get("torch_compile") or (cfg.get("context_parallel_size") or 1) > 1:
            return  # Other code compiles the layers, or cuts rows in pieces
        sizes = {"batch_size": cfg["micro_batch_size"], "seq_len": cfg["sequence_len"]}
        prepared = self.host.before_training(model, objective=_loss_of(cfg) or "sft", **sizes)
        if prepared is not None:
            LOG.info("%s", prepared)
            self._undo.callback(prepared.remove)

    def post_lora_merge(self, cfg: Any, adapter_path: str, output_path: str) -> None:
        if not is_named(cfg):
            return
        settings = ExpertsSettings.read(cfg.get(BLOCK))
        if settings.pack_experts:
            # axolotl's merge drops experts that are separate tensors in the checkpoint
            target, base = Path(output_path), Path(str(cfg["base_model"])).expanduser()
            for file in (file for pattern in _WEIGHTS for file in target.glob(pattern)):
                file.unlink()
            if not base.is_dir():
                from huggingface_hub import snapshot_download

                revision = cfg.get("revision_of_model")
                base = Path(snapshot_download(cfg["base_model"], revision=revision))
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".moe_qlora-") as temporary:
                fresh = Path(temporary) / "merged"
                report = ExpertsHost(settings).merge(base, adapter_path, fresh)
                for new in (new for each in (*_WEIGHTS, "config.json") for new in fresh.glob(each)):
                    shutil.move(new, target / new.name)
            LOG.info("moe_qlora has merged the adapter again: %s", replace(report, folder=target))

    def post_train_unload(self, cfg: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        self._written.close()
        self._undo.close()
        if self.host is not None:
            self.host.close()
            self.host = None


def read_config(file: str) -> Any:
    """Return a YAML file as axolotl validates it; a `ConfigError` where it is refused."""
    from axolotl.cli.config import load_cfg

    try:
        return load_cfg(file)
    except ValueError as error:  # of pydantic too
        raise ConfigError(f"axolotl refuses {file}: {error}") from error


def _put_back(values: Any, name: str, before: Mapping[str, Any]) -> None:
    if name in before:
        values[name] = before[name]
    else:
        values.pop(name, None)


def _loss_of(cfg: Any) -> str:
    """Return the `rl` of a configuration, an enumeration or a word; "" without."""
    return str(cfg.get("rl") or "").rpartition(".")[2].lower()
