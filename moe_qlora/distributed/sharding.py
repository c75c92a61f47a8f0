"""FSDP2 and other engines that shard over packed models.

`prepare_sharding` makes parameters of packed weights' statistics, as codes are: engines shard and
gather both alike, and cast neither. `shards_integers` lets torch before 2.13 shard uint8.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from bitsandbytes import MatmulLtState
from bitsandbytes import matmul as bnb_matmul_8bit
from bitsandbytes import matmul_4bit as bnb_matmul_4bit
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from ..packing import decoders, parametrize
from ..packing.codec import require_whole, unpack
from ..packing.decoders import Decoder, Params4bit, bnb, is_share, read

Wrap = Collection[str] | Callable[[nn.Module], bool]
"""Which modules are sharded by themselves: names of classes, or a predicate of a module."""


def prepare_sharding(model: nn.Module) -> nn.Module:
    """Make the statistics of every packed weight parameters, so that engines shard them; in place.

    A distributed run does this by itself when it packs or loads a model, and in `get_peft_model`.
    Call it for a model that was packed before, ahead of `fully_shard`; twice changes nothing. It
    saves the same packed folder as before; its `state_dict` has torch's keys, which engines look
    up as parameters (parametrize.py). A `ConfigError` where experts lie in host memory.
    """
    parametrize.check_resident(model)
    return lay_out(model)


def lay_out(model: nn.Module) -> nn.Module:
    """Do what `prepare_sharding` does; leave alone what lies in host memory."""
    done: dict[int, tuple[nn.Parameter, Any]] = {}  # tied weights stay tied
    for module_name, module, name in list(parametrize.iter_packed(model)):
        chain: Any = parametrize.parametrization_list(module, name)
        codes, decoder = chain.original, chain[0]
        if id(codes) in done:
            # Engines tell tied parameters by their modules: one module in two layers confuses
            # fully_shard.
            held, first = done[id(codes)]
            decoder = first.replaced({})
            decoder._parameters = {**first._parameters}
        elif decoder._parameters or chain.host:
            continue
        else:
            decoder.origin.name = unwrapped_name(f"{module_name}.{name}".lstrip("."))
            held = _lay_out(decoder, read(codes, decoder))
            done[id(codes)] = held, decoder
        chain._parameters["original"], chain._modules["0"] = held, decoder
    for name, module in list(model.named_modules()):
        linear: Any = module
        if type(module) in _SHARDABLE and decoders.has_codes(linear):
            packed = decoders.read_linear(module)
            decoder = Decoder(packed)
            decoder.origin.name = unwrapped_name(f"{name}.weight".lstrip("."))
            linear.__class__ = _SHARDABLE[type(module)]
            linear.weight, linear.statistics = _lay_out(decoder, packed), decoder
            if decoder.is_4bit:
                linear.weight.module, linear.quant_state = module, None  # as bitsandbytes has it
            else:
                linear.weight = nn.Parameter(packed.codes, requires_grad=False)  # in their shape
                linear.state.CB = linear.state.SCB = None
        elif isinstance(module, ShardableLinear4bit) and not isinstance(linear.weight, PackedCodes):
            weight, decoder = linear.weight, linear.statistics  # for PEFT
            weight.compress_statistics = bool(decoder.nested_blocksize)
            weight.quant_type, weight.quant_storage = decoder.kind, decoder.storage_dtype
    return model


def _lay_out(decoder: Any, packed: PackedWeight) -> nn.Parameter:
    """Make parameters of a decoder's statistics, and of the codes of this weight, which it has."""
    for part, tensor in [item for item in decoder._buffers.items() if item[0] != "tables"]:
        del decoder._buffers[part]
        decoder._non_persistent_buffers_set.discard(part)
        decoder.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    codes = packed.flat_codes.unsqueeze(1)
    if not decoder.is_4bit:
        return nn.Parameter(codes, requires_grad=False)
    return decoders.params4bit(codes, decoder.quant_state, PackedCodes)


class PackedCodes(Params4bit):
    """Codes that engines shard: uint8, for any storage dtype."""

    # Not called Params4bit: accelerate (1.15, fsdp2_prepare_model) leaves those out of the sharding

    # Chunks and copies are plain tensors, as those of any nn.Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self.detach().to(device=device, non_blocking=non_blocking)


class _ShardableLinear(nn.Module):
    """A packed Linear layer whose statistics are parameters, of its submodule."""

    stock: ClassVar[type]
    weight: Tensor
    bias: Tensor | None
    statistics: Any
    product: Any  # by bitsandbytes, whose gradient function references the codes

    def restore_stock(self) -> None:
        layer: Any = self
        packed = read(layer.weight, layer.statistics)
        require_whole(packed)
        del layer.statistics
        layer.__class__ = self.stock
        decoders.write_linear(layer, packed)

    def forward(self, x: Tensor) -> Tensor:
        _require_gathered(self)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if hasattr(self.weight, "ds_id"):  # nothing gathered may outlive the product
            return cast(Tensor, _ReadAgain.apply(x, bias, self))
        return cast(Tensor, self.product(x, bias))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # No bitsandbytes keys, which engines do not find as parameters: statistics save themselves.
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)


class ShardableLinear4bit(_ShardableLinear, bnb.Linear4bit):
    """A shardable 4-bit Linear layer."""

    stock = bnb.Linear4bit
    compute_type_is_set: bool
    compute_dtype: torch.dtype | None
    set_compute_type: Any

    def forward(self, x: Tensor) -> Tensor:
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        return super().forward(x.to(self.compute_dtype or x.dtype)).to(x.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        state = decoders.to_quant_state(read(self.weight, self.statistics))
        out: Tensor = bnb_matmul_4bit(x, self.weight, bias=bias, quant_state=state)
        return out


class ShardableLinear8bit(_ShardableLinear, bnb.Linear8bitLt):
    """A shardable 8-bit Linear layer."""

    stock = bnb.Linear8bitLt
    state: Any

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        state = MatmulLtState()
        state.threshold, state.has_fp16_weights = self.state.threshold, False
        state.is_training = self.training
        state.CB = self.weight.detach()
        state.SCB = self.statistics.absmax.detach().view(torch.float32)
        out: Tensor = bnb_matmul_8bit(x, self.weight, bias=bias, state=state)
        return out


_SHARDABLE: dict[type, type] = {
    cls.stock: cls for cls in (ShardableLinear4bit, ShardableLinear8bit)
}


class _ReadAgain(torch.autograd.Function):
    """A Linear layer's product whose backward reads the codes again."""

    # ZeRO-3 gathers codes into new memory for forward and for backward. bitsandbytes' functions
    # would reference those of the forward, invisibly to checkpointing: all layers' until backward.

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


def _require_gathered(module: _ShardableLinear) -> None:
    if not torch.compiler.is_compiling() and is_share(module.weight):
        require_whole(read(module.weight, module.statistics))


@contextmanager
def shards_integers() -> Iterator[None]:
    """Let `fully_shard` shard integer parameters on every torch, within the block."""
    # torch before 2.13 requires gradients of each shard, and a mixed precision policy casts codes
    # as it gathers them. Parameters sharded in the block are gathered uncast, afterwards too.
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

    module: Any = fsdp_param
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13):
        yield
        return
    stock, build = module.nn, module.FSDPParam.__init__

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        floating = data.is_floating_point()
        return nn.Parameter(data, floating if requires_grad is None else requires_grad)

    def keep_dtype(self: Any, mp_policy: Any) -> None:
        self.orig_dtype = self.sharded_param.dtype
        self.param_dtype = self.reduce_dtype = None

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if not self.sharded_param.is_floating_point():
            self.init_dtype_attrs = MethodType(keep_dtype, self)

    # its module only calls nn.Parameter, and needs no class
    module.nn = SimpleNamespace(**{**vars(nn), "Parameter": parameter})
    module.FSDPParam.__init__ = init
    try:
        yield
    finally:
        module.nn, module.FSDPParam.__init__ = stock, build


def shard_model(model: nn.Module, mesh: Any, wrap: Wrap | None = None, **options: Any) -> None:
    """Apply `fully_shard` to modules of a model, which may be on meta, then to the rest; in place.

    `wrap` chooses those that are gathered by themselves, by default those of `_no_split_modules`.
    """
    from torch.distributed.fsdp import fully_shard

    if wrap is None:
        wrap, field = set(), "_no_split_modules"
        for part in model.modules():  # PEFT's wrappers forward getattr to the module inside
            wrap.update(vars(part).get(field, getattr(type(part), field, None)) or ())
    blocks = [
        part
        for part in model.modules()
        if part is not model and (wrap(part) if callable(wrap) else type(part).__name__ in wrap)
    ]
    if not blocks:
        raise ConfigError(
            f"No module of the model is chosen by wrap={wrap!r:.80}: name the class of its decoder "
            "layers, so that one layer is gathered at a time."
        )
    with shards_integers():
        for block in blocks[::-1]:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
