"""Linear layers beyond PEFT's LoRA, which adds s B A x to what the call of an `nn.Linear` returns.

`unfit_linears` finds those that get none; `serve_reads` serves those whose weight the module around
them reads instead of calling them, as Longcat's routers and Mamba layers do.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import Linear as StockLinear
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..detection.weight_reads import weights_read
from ..layout import unwrapped, unwrapped_name


def unfit_linears(model: nn.Module) -> dict[str, str]:
    """Return their full names, as before an adapter, each with the reason as half a sentence.

    The model's own code derives their class from `nn.Linear` and gives it a forward: routers return
    two values, and LoRA on DeepSeek-V4's grouped projection has the size of all groups. Or PEFT
    refuses LoRA on them, as on the output projections of Nemotron-H's Mamba layers.
    """
    reasons = {}
    own_code = {type(m).__module__ for m in model.modules() if isinstance(m, PreTrainedModel)}
    config = LoraConfig()
    for name, module in model.named_modules():
        kind = type(unwrapped(module))
        if not issubclass(kind, nn.Linear):
            continue
        path = unwrapped_name(name)
        if kind.forward is not nn.Linear.forward and kind.__module__ in own_code:
            reasons[path] = f"{kind.__name__} computes otherwise than nn.Linear"
        else:
            try:
                _check_lora_target_modules_mamba(config, model, path.rpartition(".")[2])
            except ValueError:
                reasons[path] = "PEFT refuses LoRA on it in this type of model"
    return reasons


class ReadLinear(StockLinear):
    """LoRA on a Linear layer that is also right where its weight is read: it is W + s B A then.

    The sum has W's dtype, as the code around it expects. Dropout is for calls alone.
    """

    @property
    def weight(self: Any) -> Tensor:
        weight: Tensor = self.get_base_layer().weight
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                if name in self.lora_A and name not in self.lora_variant:
                    weight = weight + self.get_delta_weight(name).to(weight.dtype)
        return weight


def serve_reads(model: nn.Module) -> None:
    """Turn PEFT's layers over Linear layers whose weight is read into those of this file."""
    for name in weights_read(model):
        layer = model.get_submodule(name)
        if type(layer) is StockLinear:
            layer.__class__ = ReadLinear
