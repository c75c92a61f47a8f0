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
from torch import Tensor, distributed, nn

from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from . import parametrize
from .codec import require_whole, unpack
from .decoders import (
    PackedCodes,
    PackedInt8,
    Shardable4bit,
    ShardableStatistics,
    bnb,
    is_shardable,
    is_share,
    params4bit,
    read,
)
from .quant_state import from_quant_state, to_quant_state


def runs_distributed() -> bool:
    """Whether a process group is initialized, or torchrun started this process."""
    if not distributed.is_available():
        return False
    return distributed.is_initialized() or distributed.is_torchelastic_launched()


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
    if isinstance(decoder, PackedInt8):
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


def packed_codes(packed: PackedWeight, statistics: ShardableStatistics) -> nn.Parameter:
    """Return the parameter of a 4-bit weight's codes, `(bytes, 1)` uint8."""
    parameter = PackedCodes(
        packed.codes.detach().view(-1).view(torch.uint8).unsqueeze(1),
        requires_grad=False,
        blocksize=packed.blocksize,
        compress_statistics=packed.nested is not None,
        quant_type=packed.kind,
        quant_storage=torch.uint8,
        bnb_quantized=True,
    )
    parameter.belong_to(statistics)
    return cast(nn.Parameter, parameter)


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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Not bitsandbytes' keys, which no engine finds as parameters: statistics save themselves.
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


class ShardableLinear8bit(bnb.Linear8bitLt):
    """A bitsandbytes 8-bit Linear layer whose row scales are a parameter, of its submodule."""

    statistics: PackedInt8

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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


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
    statistics = PackedInt8(packed)
    _scales_as_parameter(statistics)
    module.__class__ = ShardableLinear8bit
    module.weight, module.statistics = nn.Parameter(packed.codes, requires_grad=False), statistics
    module.state.CB = module.state.SCB = None


def restore_linear(module: nn.Module) -> None:
    """Undo `prepare_sharding` for one bitsandbytes Linear layer, whose tensors are whole here.

    PEFT merges adapters into stock layers only. Any other module is left alone.
    """
    if not isinstance(module, (ShardableLinear4bit, ShardableLinear8bit)):
        return
    layer: Any = module
    packed = read(layer.weight, layer.statistics)
    require_whole(packed)
    del layer.statistics
    layer.__class__ = bnb.Linear8bitLt if packed.kind == "int8" else bnb.Linear4bit
    write_linear(layer, packed)


def read_linear(layer: Any) -> PackedWeight:
    """Return the packed weight of a stock bitsandbytes Linear layer; copies no codes."""
    if isinstance(layer, bnb.Linear8bitLt):
        weight, state = layer.weight, layer.state
        codes = state.CB if weight.CB is None else weight.CB
        scales = state.SCB if weight.SCB is None else weight.SCB
        shape = tuple(codes.shape)
        return PackedWeight(codes, scales, None, 0, None, shape, "int8", torch.float16)
    codes, state = layer.weight.data, layer.weight.quant_state
    if _is_converted(layer):
        import bitsandbytes.nn.modules as bnb_modules

        absmax, state = state.absmax, copy.copy(state)  # which the inverse changes
        codes, state = bnb_modules._convert_weight_packed_for_cpu_inverse(codes, state)
        if not state.nested:  # and leaves in the columns' order
            state.absmax = absmax.T.reshape(-1).float()
    return from_quant_state(codes, state)


def keep_layout(model: nn.Module) -> None:
    """Keep the codes of bitsandbytes' 4-bit Linear layers as they were packed, in place.

    In evaluation on CPUs with AVX512-BF16, bitsandbytes 0.50 converts them to another form, in
    which the layer computes in bf16 and passes no gradient, also in training later. What decodes it
    afterwards gets other weights: its absmax is rounded to bf16, and comes back in another order.
    """
    for module in model.modules():
        if isinstance(module, bnb.Linear4bit):
            layer: Any = module
            if _is_converted(layer):
                write_linear(layer, read_linear(layer))
            layer.support_avx512bf16_for_cpu = False


def _is_converted(layer: Any) -> bool:
    state = getattr(layer.weight, "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def write_linear(layer: Any, packed: PackedWeight) -> None:
    """Give a stock bitsandbytes Linear layer this packed weight, as one that was just loaded."""
    if packed.kind == "int8":
        codes, scales = packed.codes, packed.absmax
        layer.weight = bnb.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
        layer.state.CB = layer.state.SCB = None
        return
    layer.weight = params4bit(packed.codes, to_quant_state(packed))
    layer.weight.module, layer.quant_state = layer, layer.weight.quant_state


def _scales_as_parameter(decoder: PackedInt8) -> None:
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
