"""Turns packed weights into the layout that engines of many GPUs shard: every tensor a parameter.

`prepare_sharding` does it for the experts and for bitsandbytes' 4-bit Linear layers of a model
(decoders.py has both layouts). FSDP2, DDP and DeepSpeed then see uint8 parameters without
gradients: they shard and gather statistics with their codes, and cast none of them.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from bitsandbytes import MatmulLtState
from bitsandbytes import matmul as bnb_matmul_8bit
from bitsandbytes import matmul_4bit as bnb_matmul_4bit
from torch import Tensor, nn

from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from ..packing import parametrize
from ..packing.codec import require_whole, unpack
from ..packing.decoders import (
    PackedCodes,
    PackedScales,
    Shardable4bit,
    ShardableStatistics,
    bnb,
    is_shardable,
    is_share,
    packed_codes,
    read,
)
from ..packing.linear import read_linear, write_linear


def prepare_sharding(model: nn.Module) -> nn.Module:
    """Make the statistics of every packed weight parameters, so that engines shard them; in place.

    A distributed run does this by itself when it packs or loads a model, and in `get_peft_model`.
    Call it for a model that was packed before, ahead of `fully_shard`. Calling it twice changes
    nothing. Adapters may be on the model already. The model may be on meta.

    Returns the model. It saves the same packed folder as before; its `state_dict` has torch's keys,
    `<module>.parametrizations.<name>.original` and `.0.absmax`, which engines look up as
    parameters (state_dict.py).
    """
    done: dict[int, tuple[nn.Parameter, nn.Module]] = {}  # tied weights stay tied
    for module_name, module, name in list(parametrize.iter_packed(model)):
        chain = parametrize.parametrization_list(module, name)
        decoder = chain._modules["0"]
        if is_shardable(decoder) or parametrize.is_foreign(module, name):
            continue
        codes = parametrize.original_of(module, name)
        if id(codes) in done:
            owner, statistics = done[id(codes)]
            statistics = _another(statistics)
        else:
            owner, statistics = _shardable(parametrize.read_packed(module, name), decoder)
            cast(Any, statistics).name = unwrapped_name(f"{module_name}.{name}".lstrip("."))
            done[id(codes)] = owner, statistics
        chain._parameters["original"], chain._modules["0"] = owner, statistics
    for name, module in list(model.named_modules()):
        if type(module) is bnb.Linear4bit:
            _prepare_4bit(module)
        elif type(module) is bnb.Linear8bitLt:
            _prepare_8bit(module)
        if isinstance(module, (ShardableLinear4bit, ShardableLinear8bit)):
            cast(Any, module.statistics).name = unwrapped_name(f"{name}.weight".lstrip("."))
        if isinstance(module, ShardableLinear4bit):
            _describe_share(module)
    return model


def _describe_share(module: ShardableLinear4bit) -> None:
    """Give a layer's codes, where FSDP2 has sharded them, what PEFT reads on a `Params4bit`."""
    weight: Any = module.weight
    if not isinstance(weight, PackedCodes):
        statistics = module.statistics
        weight.compress_statistics, weight.quant_type = statistics.double_quant, statistics.kind
        weight.quant_storage = statistics.storage_dtype


def _shardable(packed: PackedWeight, decoder: Any) -> tuple[nn.Parameter, nn.Module]:
    """Return the codes' parameter and the decoder of a packed weight in the shardable layout."""
    if isinstance(decoder, PackedScales):
        _scales_as_parameter(decoder)
        return nn.Parameter(packed.codes.view(-1, 1), requires_grad=False), decoder
    statistics = Shardable4bit(packed)
    return packed_codes(packed, statistics), statistics


def _another(statistics: nn.Module) -> nn.Module:
    """Return a module with the same parameters, for a weight that is tied.

    Engines tell tied parameters by their modules: one module in two layers confuses fully_shard.
    """
    other = copy.copy(statistics)
    other._parameters, other._buffers = dict(other._parameters), dict(other._buffers)
    return other


class ShardableLinear4bit(bnb.Linear4bit):
    """A bitsandbytes 4-bit Linear layer whose statistics are parameters, of its submodule.

    Made from a packed `Linear4bit` by `prepare_sharding`, which changes the class of the instance.
    """

    statistics: ShardableStatistics
    compute_type_is_set: bool
    compute_dtype: torch.dtype | None

    def forward(self, x: Tensor) -> Tensor:
        """Compute `x` `(..., in)` times the dequantized weight, plus the bias."""
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        _require_gathered(self)
        return _product(self, x, bias).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute by bitsandbytes, whose gradient function holds on to the codes."""
        state = self.statistics.quant_state
        out: Tensor = bnb_matmul_4bit(x, self.weight, bias=bias, quant_state=state)
        return out

    def restore_stock(self) -> None:
        """Become bitsandbytes' own layer again."""
        _restore_stock(self, bnb.Linear4bit)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Not bitsandbytes' keys, which no engine finds as parameters: statistics save themselves.
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


class ShardableLinear8bit(bnb.Linear8bitLt):
    """A bitsandbytes 8-bit Linear layer whose row scales are a parameter, of its submodule."""

    statistics: PackedScales

    def forward(self, x: Tensor) -> Tensor:
        """Compute `x` `(..., in)` times the dequantized weight, plus the bias."""
        _require_gathered(self)
        return _product(self, x, None if self.bias is None else self.bias.to(x.dtype))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute by bitsandbytes, whose gradient function holds on to the codes."""
        state = MatmulLtState()
        state.threshold, state.has_fp16_weights = self.state.threshold, False
        state.is_training = self.training
        state.CB = self.weight.detach()
        state.SCB = self.statistics.scale_bits.detach().view(torch.float32)
        out: Tensor = bnb_matmul_8bit(x, self.weight, bias=bias, state=state)
        return out

    def restore_stock(self) -> None:
        """Become bitsandbytes' own layer again."""
        _restore_stock(self, bnb.Linear8bitLt)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


def _restore_stock(layer: Any, cls: type) -> None:
    packed = read(layer.weight, layer.statistics)
    require_whole(packed)
    del layer.statistics
    layer.__class__ = cls
    write_linear(layer, packed)


def _product(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a layer's product, so that nothing gathered outlives it under ZeRO-3."""
    if hasattr(module.weight, "ds_id"):
        return cast(Tensor, _ReadAgain.apply(x, bias, module))
    return cast(Tensor, module.product(x, bias))


class _ReadAgain(torch.autograd.Function):
    """A Linear layer's product whose backward reads the codes anew.

    ZeRO-3 gathers codes into new memory for forward and for backward. bitsandbytes' functions keep
    those of the forward, where checkpointing does not see them: all layers' until the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.module = module
        return cast(Tensor, module.product(x, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        module = ctx.module
        _require_gathered(module)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = unpack(read(module.weight, module.statistics))
            grad_x = grad @ weight.to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


def _require_gathered(module: ShardableLinear4bit | ShardableLinear8bit) -> None:
    """Raise where an engine has not gathered a layer's codes."""
    if not torch.compiler.is_compiling() and is_share(module.weight):
        require_whole(read(module.weight, module.statistics))


def _prepare_8bit(module: Any) -> None:
    """Do for one `Linear8bitLt` what `prepare_sharding` does for experts."""
    if module.weight.CB is None and module.state.CB is None:
        return
    packed = read_linear(module)
    statistics = PackedScales(packed)
    _scales_as_parameter(statistics)
    module.__class__ = ShardableLinear8bit
    module.weight, module.statistics = nn.Parameter(packed.codes, requires_grad=False), statistics
    module.state.CB = module.state.SCB = None


def _scales_as_parameter(decoder: PackedScales) -> None:
    bits = cast(Tensor, decoder._buffers.pop("scale_bits"))
    decoder._non_persistent_buffers_set.discard("scale_bits")
    decoder.register_parameter("scale_bits", nn.Parameter(bits, requires_grad=False))


def _prepare_4bit(module: Any) -> None:
    """Do for one `Linear4bit` what `prepare_sharding` does for experts."""
    if getattr(module.weight, "quant_state", None) is None:
        return
    packed = read_linear(module)
    statistics = ShardableStatistics(packed)
    codes: Any = packed_codes(packed, statistics)
    codes.module = module  # as bitsandbytes' own parameter has it
    module.__class__ = ShardableLinear4bit
    module.weight, module.statistics, module.quant_state = codes, statistics, None
