"""An experts layer, packed, with LoRA on both projections: factors as leaves, all gradients."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe_qlora.experts import forward, operands
from moe_qlora.experts.operands import LoraFactors
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_config

NAMES = ("gate_up_proj", "down_proj")
E, H, INNER, K = 3, 64, 64, 2


class Provider:
    """LoRA on two projections of an experts module, by default of one rank each.

    `sizes` are the features that come out and go in, by the projection's name.
    """

    def __init__(
        self, sizes: dict[str, tuple[int, int]], experts: int, dtype: torch.dtype,
        ranks: Sequence[Sequence[int]] = ((3,), (5,)), size: float = 0.1, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        self.all: dict[str, tuple[LoraFactors, ...]] = {}
        for (name, (out, into)), each in zip(sizes.items(), ranks, strict=True):
            terms = []
            for number, rank in enumerate(each):
                a, b = torch.randn(experts * rank, into), torch.randn(out, rank * experts)
                leaves = [(t * size).to(dtype).requires_grad_() for t in (a, b)]
                drops = nn.Dropout(dropout) if dropout else None
                terms.append(LoraFactors(*leaves, 0.5 + 0.25 * number, drops))
            self.all[name] = tuple(terms)

    def active_lora(self, name: str) -> tuple[LoraFactors, ...]:
        return self.all.get(name, ())

    def to(self, device: str, dtype: torch.dtype) -> "Provider":
        """A copy, with leaves of its own there."""
        twin = copy.copy(self)

        def moved(term: LoraFactors) -> LoraFactors:
            a, b = (t.detach().to(device, dtype, copy=True) for t in (term.a, term.b))
            return LoraFactors(a.requires_grad_(), b.requires_grad_(), term.scaling, term.dropout)

        twin.all = {name: tuple(map(moved, terms)) for name, terms in self.all.items()}
        return twin

    def leaves(self) -> list[Tensor]:
        return [leaf for terms in self.all.values() for term in terms for leaf in (term.a, term.b)]


def packed_host() -> nn.Module:
    """A model of one experts module of transformers', packed, in fp16: `host.experts`."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = copy.deepcopy(tiny_config("qwen3_moe"))
    config.hidden_size, config.moe_intermediate_size = H, INNER
    config.num_experts, config.num_experts_per_tok = E, K
    config._experts_implementation = "eager"
    host = nn.Module()
    host.config, host.experts = config, Qwen3MoeExperts(config).half()
    host.requires_grad_(False)
    for name in NAMES:
        parameter = getattr(host.experts, name)
        nn.init.normal_(parameter, std=0.1)
        packed = codec.pack(parameter.data, CodecSettings("nf4", True, torch.uint8))
        parametrize.attach(host.experts, name, packed)
    return host


def add_lora(host: nn.Module, device: str = "cpu") -> Provider:
    """Let the packed experts of `packed_host`, or of its copy on this device, compute with LoRA."""
    forward.activate(host, ["experts"])
    with torch.device(device):
        provider = Provider({NAMES[0]: (2 * INNER, H), NAMES[1]: (H, INNER)}, E, torch.float16)
    operands.set_lora_source(host.experts, provider)
    return provider


def random_like(x: Tensor) -> Tensor:
    """The same numbers each time on a device."""
    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def layer_gradients(
    run: Callable[..., Tensor], provider: Provider, parts: Sequence[Tensor],
    seed: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The output, and the gradients of x, the routing weights and the factors, from this one."""
    out = run(*parts)
    seed = random_like(out) if seed is None else seed
    leaves = [parts[0], parts[2], *provider.leaves()]
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]
