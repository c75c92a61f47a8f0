"""LLaMA-Factory with packed experts: its own YAML file, with a `moe_qlora:` block in it.

    python -m moe_qlora.integrations.llama_factory config.yaml [key=value ...]
    torchrun --nproc-per-node 8 -m moe_qlora.integrations.llama_factory config.yaml

or, in a program:

    from llamafactory.train.tuner import run_exp
    from moe_qlora.integrations.llama_factory import packed_experts, prepares

    with packed_experts({"lora_experts": True}) as host:
        run_exp(args, callbacks=[prepares(host, args["cutoff_len"])])

LLaMA-Factory has no hook between building a model and adding adapters: within the block, functions
of this file replace two names of its module `llamafactory.model.adapter`. Everything else is in
`ExpertsHost`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MoeQloraError, one_line
from ..models.files import read_json
from ..models.trainer.checks import BLOCK, ExpertsSettings
from .host import ExpertsHost

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import TrainerCallback

BAD_INPUT = 2

_CUTOFF = 2048  # LLaMA-Factory's default of cutoff_len

# Options that build the model or its adapters by other code.
_ELSEWHERE = ("use_unsloth", "use_kt", "use_mca", "mixture_of_depths")


@contextmanager
def packed_experts(
    settings: ExpertsSettings | Mapping[str, Any] | None = None,
) -> Iterator[ExpertsHost]:
    """LLaMA-Factory packs experts in every model that it loads, and trains LoRA on them.

    Holds for `run_exp`, `load_model` and `init_adapter` alike. A wrong setting is a `ConfigError`;
    within the block errors are those of `ExpertsHost`.
    """
    from llamafactory.model import adapter

    with ExpertsHost(settings) as host, ExitStack() as undo:
        steps = _Steps(host)
        for name, step in (("get_peft_model", steps.get_peft_model), ("PeftModel", steps)):
            undo.callback(setattr, adapter, name, getattr(adapter, name))
            setattr(adapter, name, step)
        host.before_build()
        yield host


class _Steps:
    """Replacements for PEFT's function and class method that LLaMA-Factory calls."""

    def __init__(self, host: ExpertsHost) -> None:
        self.host = host

    def get_peft_model(self, model: nn.Module, config: PeftConfig) -> PeftModel:
        """Call `peft.get_peft_model` on a model that is checked to be packed."""
        import peft

        self._built(model)
        wrapped = peft.get_peft_model(model, self.host.before_peft(model, config))
        return self.host.after_peft(wrapped)

    def from_pretrained(self, model: nn.Module, adapter: str, **kwargs: Any) -> PeftModel:
        """Load an adapter; `PeftModel.from_pretrained` would lose LoRA on packed experts."""
        from ..lora.load import load_adapter

        self._built(model)
        return self.host.after_peft(load_adapter(model, adapter, **kwargs))

    def _built(self, model: nn.Module) -> None:
        self.host.after_build(model)
        self.host.before_build()  # a reference or reward model may come after it


def prepares(host: ExpertsHost, seq_len: int, *, objective: str = "sft") -> TrainerCallback:
    """Return a callback of Trainer that prepares training where the host's settings ask for it.

    It does so when training begins: after the adapters, which LLaMA-Factory casts, are complete.
    `objective` is that of `ExpertsHost.before_training`.
    """
    from transformers import TrainerCallback

    class Prepares(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
            rows = args.per_device_train_batch_size
            host.before_training(model, batch_size=rows, seq_len=seq_len, objective=objective)

    return Prepares()


def check(args: Mapping[str, Any]) -> ExpertsSettings:
    """Check the arguments of a run (a YAML file as it was read); return its settings."""
    settings = ExpertsSettings.read(args.get(BLOCK))
    if not settings.pack_experts:
        return settings
    for key in _ELSEWHERE:
        if args.get(key):
            raise ConfigError(
                f"{key} builds the model by other code, which {BLOCK} cannot take part in: "
                f"take {key} or {BLOCK} out of the file."
            )
    bits, method = args.get("quantization_bit"), args.get("quantization_method", "bnb")
    file = Path(str(args.get("model_name_or_path"))) / "config.json"
    quantized = bits is None and file.is_file() and "quantization_config" in read_json(file)
    if not quantized and (bits not in (4, 8) or method != "bnb"):
        raise ConfigError(
            f"{BLOCK} packs experts with bitsandbytes' settings, and the file has "
            f"quantization_bit {bits} and quantization_method {method}: set quantization_bit to 4 "
            "or 8 and quantization_method to bnb."
        )
    kind = args.get("finetuning_type", "lora")
    if kind != "lora":
        raise ConfigError(
            f"finetuning_type is {kind}, and packed experts take LoRA only: set it to lora."
        )
    return settings


def train() -> None:
    """Train as `llamafactory-cli train` does, from the file and overrides on the command line."""
    if find_spec("llamafactory") is None:
        raise ConfigError("LLaMA-Factory is not installed here: pip install llamafactory.")
    from llamafactory.hparams import read_args
    from llamafactory.train.tuner import run_exp

    args = read_args()
    if not isinstance(args, dict):
        raise ConfigError("Name a YAML or JSON file with the arguments of the run, first of all.")
    settings = check(args)
    run_args = {key: value for key, value in args.items() if key != BLOCK}
    with packed_experts(settings) as host:
        run_exp(run_args, callbacks=[prepares(host, **step_of(args))])


def step_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `prepares` needs of the arguments of a run."""
    stage, preference = str(args.get("stage", "sft")), str(args.get("pref_loss", "sigmoid"))
    alone = stage == "dpo" and preference in ("orpo", "simpo")  # without a reference
    return {
        "seq_len": int(args.get("cutoff_len", _CUTOFF)),
        "objective": preference if alone else stage,
    }


def main() -> int:
    """Run `train`, with errors of this package as one line and exit code 2."""
    try:
        train()
    except MoeQloraError as error:
        sys.stderr.write(one_line("error", error))
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
