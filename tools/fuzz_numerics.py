"""Random configurations of packed experts layers against a loop in fp64: outputs and gradients.

    python tools/fuzz_numerics.py --cases 1000                 CPU: torch and Triton's interpreter
    python tools/fuzz_numerics.py --cases 200 --device cuda    the kernels
    python tools/fuzz_numerics.py --case 731                   one again, with its settings

Each case draws a layout, sizes, a gate, quantization, dtypes, adapters, a routing and how it runs.
The loop decodes by the format's definition (bitsandbytes' own function on a CPU is wrong for rows
that are not whole blocks) and computes token by token; it shares no code with the package.
Exit code 1 where a case is off by more than its dtypes' rounding allows.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation

from moe_qlora.experts import backend, forward, operands
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings
from tools.fuzz_oracle import decode_parameter

TOLERANCES = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest relative error, in Frobenius norms: some 10 roundings of 2^-24, 2^-11 and 2^-8."""

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "mish": F.mish,  # one that the kernels do not know
}


@dataclass
class Case:
    """What one case draws."""

    experts: int
    top_k: int
    tokens: int
    hidden: int
    inner: int
    transposed: bool
    bias: bool
    gated: bool
    interleaved: bool
    norm: bool
    act: str
    kind: str
    double: bool
    storage: torch.dtype
    dtype: torch.dtype
    autocast: torch.dtype | None
    adapter_dtype: torch.dtype
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    same_scaling: bool
    packed: tuple[bool, bool]
    sentinels: bool
    skewed: bool
    checkpointing: str
    kernels: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype whose rounding decides."""
        narrow = [d for d in (self.autocast, self.dtype) if d is not None]
        return max(narrow, key=TOLERANCES.__getitem__)


def draw(number: int, device: str) -> Case:
    """Return the settings of a case."""
    r = random.Random(number)
    kernels = device == "cuda" or r.random() < 0.4
    # Triton's interpreter computes in NumPy, which has no bfloat16.
    interpreted = kernels and device == "cpu"
    halves = [torch.float16] if interpreted else [torch.bfloat16, torch.float16]
    dtype = r.choice(halves if kernels else [*halves, torch.float32, torch.float32])
    gated, kind = r.random() < 0.8, r.choice(["nf4", "nf4", "fp4", "int8"])
    experts = r.randint(1, 9)
    step = 64 if kernels else 2
    rank = lambda: tuple(r.choice([1, 2, 3, 8, 17]) for _ in range(r.choice([0, 1, 1, 1, 2])))  # noqa: E731
    packed = r.choice([(True, True)] * (30 if kernels else 4) + [(True, False), (False, True)])
    hidden, inner = (step * r.randint(1, 2 if kernels else 40) for _ in range(2))
    storage = r.choice([torch.uint8, *halves, torch.float32])
    if experts * hidden * inner // 2 % storage.itemsize:  # codes fill whole numbers, or are refused
        storage = torch.uint8
    return Case(
        experts=experts,
        top_k=r.randint(1, min(experts, 4)),
        tokens=r.choice([1, 2, 7, 19, 40] + ([300, 3000] if device == "cuda" else [])),
        hidden=hidden,
        inner=inner,
        transposed=r.random() < 0.4,
        bias=r.random() < 0.4,
        gated=gated,
        interleaved=gated and r.random() < 0.3,
        norm=r.random() < (0.02 if kernels else 0.15),
        act=r.choice(list(ACTS)[: 4 if kernels and r.random() < 0.9 else None]),
        kind=kind,
        double=kind != "int8" and r.random() < 0.5,
        storage=torch.int8 if kind == "int8" else storage,
        dtype=dtype,
        autocast=r.choice([None, None, *halves]),
        adapter_dtype=r.choice([dtype, torch.float32]),
        ranks=(rank(), rank()),
        same_scaling=r.random() < 0.8,
        packed=packed,
        sentinels=r.random() < 0.25,
        skewed=r.random() < 0.3,
        checkpointing=r.choice(["no", "no", "reentrant", "non-reentrant"]),
        kernels=kernels,
    )


def build(case: Case, g: torch.Generator) -> nn.Module:
    """Return an experts module as transformers' classes are, unpacked."""

    class Experts(nn.Module):
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__()
            width = (2 if case.gated else 1) * case.inner
            first = "gate_up_proj" if case.gated else "up_proj"
            self.num_experts = case.experts
            for name, out, into in (
                (first, width, case.hidden),
                ("down_proj", case.hidden, case.inner),
            ):
                shape = (into, out) if case.transposed else (out, into)
                weight = torch.randn(case.experts, *shape, generator=g) / into**0.5
                self.register_parameter(name, nn.Parameter(weight.to(case.dtype)))
                if case.bias:
                    bias = torch.randn(case.experts, out, generator=g).to(case.dtype) * 0.3
                    self.register_parameter(f"{name}_bias", nn.Parameter(bias))
            if case.norm:
                self.post_expert_norm = nn.LayerNorm(case.hidden, dtype=case.dtype)
                nn.init.normal_(self.post_expert_norm.bias)
            self.act_fn = ACTS[case.act]

        if case.gated and case.interleaved:

            def _apply_gate(self, pre: Tensor) -> Tensor:
                return self.act_fn(pre[..., ::2]) * pre[..., 1::2]

        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError("the class's own forward must not run")

    decorated = use_experts_implementation(
        Experts,
        is_transposed=case.transposed,
        has_bias=case.bias,
        has_gate=case.gated,
        is_concatenated=not case.interleaved,
        has_post_expert_norm=case.norm,
    )
    module: nn.Module = decorated(PreTrainedConfig(experts_implementation="eager"))
    return module.requires_grad_(False)


class Adapters:
    """LoRA of a module's projections, as leaves."""

    def __init__(self, case: Case, module: Any, g: torch.Generator, device: str) -> None:
        self.all: dict[str, tuple[operands.LoraFactors, ...]] = {}
        for name, ranks in zip(names(case), case.ranks, strict=True):
            shape = getattr(module, name).shape[1:]
            out, into = reversed(shape) if case.transposed else shape
            factors = []
            for i, rank in enumerate(ranks):
                sizes = (case.experts * rank, into), (out, rank * case.experts)
                a, b = (
                    (torch.randn(size, generator=g) * scale)
                    .to(device, case.adapter_dtype)
                    .requires_grad_()
                    for size, scale in zip(sizes, (into**-0.5, 0.5), strict=True)
                )
                scaling = 0.7 if case.same_scaling else 0.5 + 0.3 * i
                factors.append(operands.LoraFactors(a, b, scaling))
            self.all[name] = tuple(factors)

    def active_lora(self, name: str) -> tuple[operands.LoraFactors, ...]:
        """Return what the experts forward asks for."""
        return self.all[name]

    def leaves(self) -> list[Tensor]:
        """Return all factors."""
        return [leaf for each in self.all.values() for f in each for leaf in (f.a, f.b)]


def names(case: Case) -> tuple[str, str]:
    """Return the names of both weights."""
    return ("gate_up_proj" if case.gated else "up_proj"), "down_proj"


def reference(
    case: Case, module: Any, adapters: Adapters, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute the layer token by token, in the tensors' dtype."""
    wide = {}
    for name in names(case):
        weight = decode_parameter(module, name)
        weight = weight.transpose(1, 2) if case.transposed else weight
        for f in adapters.all[name]:
            rank = f.a.shape[0] // case.experts
            a = f.a.double().view(case.experts, rank, -1)
            b = f.b.double().view(-1, rank, case.experts)
            delta = torch.stack([b[:, :, e] @ a[e] for e in range(case.experts)])
            weight = weight + f.scaling * delta
        wide[name] = weight
    bias = {n: getattr(module, f"{n}_bias").double() for n in names(case)} if case.bias else {}
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for slot in range(case.top_k):
            e = int(index[t, slot])
            if not 0 <= e < case.experts:
                continue
            y = x[t]
            for name in names(case):
                y = wide[name][e] @ y + (bias[name][e] if case.bias else 0)
                if name != "down_proj":
                    if case.gated:
                        halves = (y[::2], y[1::2]) if case.interleaved else y.chunk(2)
                        y = ACTS[case.act](halves[0]) * halves[1]
                    else:
                        y = ACTS[case.act](y)
            if case.norm:
                norm = module.post_expert_norm
                y = F.layer_norm(y, y.shape, norm.weight.double(), norm.bias.double(), norm.eps)
            total = total + weights[t, slot] * y
        rows.append(total)
    return torch.stack(rows)


def run(number: int, device: str) -> tuple[list[float], Case, str]:
    """Run a case.

    Returns:
        The errors of the output and of each gradient as parts of the tolerance, the settings, and
        the name of the backend.
    """
    case = draw(number, device)
    g = torch.Generator().manual_seed(number)
    module: Any = build(case, g)
    adapters = Adapters(case, module, g, device)
    for name, packs in zip(names(case), case.packed, strict=True):
        if packs:
            settings = CodecSettings(case.kind, case.double, case.storage)
            parametrize.attach(module, name, codec.pack(getattr(module, name).data, settings))
    host = nn.Module()
    host.experts = module.to(device)
    forward.activate(host, ["experts"])
    operands.set_lora_source(module, adapters)
    module._is_expert_parallel = case.sentinels
    used = max(1, case.experts // 3) if case.skewed else case.experts
    index = torch.stack([
        torch.randperm(max(used, case.top_k), generator=g)[: case.top_k] for _ in range(case.tokens)
    ])  # fmt: skip
    weights = torch.rand(case.tokens, case.top_k, generator=g)
    if case.sentinels:
        beyond = torch.rand(index.shape, generator=g) < 0.3
        nobody = torch.randint(-2, 2, index.shape, generator=g)
        nobody = torch.where(nobody < 0, nobody, nobody + case.experts)
        index = torch.where(beyond, nobody, index)
        weights = torch.where(beyond, 0.0, weights)
    x = torch.randn(case.tokens, case.hidden, generator=g)
    x, weights = (t.to(device, case.dtype).requires_grad_() for t in (x, weights))
    index = index.to(device)
    call = lambda: module(x, index, weights)  # noqa: E731
    seen: list[str] = []
    choose = backend.choose_backend
    experts_forward: Any = forward  # whose reference to `choose_backend` is replaced for a while

    def noted(*args: Any) -> backend.Backend:
        seen.append(choose(*args).name)
        return choose(*args)

    real = backend.kernels_run
    experts_forward.choose_backend = noted
    if device == "cpu":
        backend.kernels_run = lambda device: case.kernels
    try:
        with torch.autocast(device, case.autocast, enabled=case.autocast is not None):
            if case.checkpointing == "no":
                out = call()
            else:
                reentrant = case.checkpointing == "reentrant"
                out = checkpoint(module, x, index, weights, use_reentrant=reentrant)
        seed = torch.randn(out.shape, generator=g).to(out)
        leaves = [x, weights, *adapters.leaves()]
        out.backward(seed)
    finally:
        backend.kernels_run, experts_forward.choose_backend = real, choose
    mine = [out.detach(), *(leaf.grad for leaf in leaves)]
    exact_x, exact_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    exact = reference(case, module, adapters, exact_x, index, exact_weights)
    for leaf in leaves:
        leaf.grad = None
    exact_leaves = [exact_x, exact_weights, *adapters.leaves()]
    grads: tuple[Tensor | None, ...] = (None,) * len(exact_leaves)
    if exact.requires_grad:  # not where no token has an expert
        grads = torch.autograd.grad(exact, exact_leaves, seed.double(), allow_unused=True)
    right = [exact, *grads]
    errors = [relative(got, wanted) for got, wanted in zip(mine, right, strict=True)]
    if case.tokens == 1:  # gradients of factors are then outer products of few sums
        errors = [error / 5 for error in errors]
    # A norm divides by the deviation of few, often small, numbers.
    tolerance = TOLERANCES[case.compute_dtype] * (5 if case.norm else 1)
    return [error / tolerance for error in errors], case, seen[0]


def relative(got: Tensor | None, wanted: Tensor | None) -> float:
    """Return the relative error in Frobenius norms; infinite where a number is not finite."""
    if wanted is None or not wanted.any():
        return 0.0 if got is None or not got.any() else math.inf
    if got is None:
        return math.inf
    wanted = wanted.detach().double()
    error = float((got.double() - wanted).norm() / wanted.norm())
    error /= 5 if wanted.numel() < 8 else 1  # few sums, each of which may nearly cancel
    return error if math.isfinite(error) else math.inf


def main() -> None:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this one and print its settings")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        let_numpy_2_read_indices()
    console = Console()
    numbers = range(options.first, options.first + options.cases)
    numbers = numbers if options.case is None else range(options.case, options.case + 1)
    off: list[int] = []
    backends: dict[str, int] = {}
    worst = 0.0
    for number in track(numbers, "cases", console=Console(stderr=True)):
        try:
            errors, case, name = run(number, options.device)
        except Exception:  # noqa: BLE001 - reported as a case that is off
            traceback.print_exc()
            off.append(number)
            continue
        backends[name] = backends.get(name, 0) + 1
        ratio = max(errors)
        worst = max(worst, ratio)
        if ratio > 1 or options.case is not None:
            off += [number] if ratio > 1 else []
            settings = ", ".join(f"{f.name}={getattr(case, f.name)}" for f in fields(case))
            parts = " ".join(f"{error:.2g}" for error in errors)
            console.print(f"case {number} by {name}, parts of its tolerance {parts}; {settings}")
    ran = ", ".join(f"{count} {name}" for name, count in sorted(backends.items()))
    console.print(f"{len(numbers)} cases ({ran}); {len(off)} off: {off}; worst {worst:.2f}")
    raise SystemExit(bool(off))


def let_numpy_2_read_indices() -> None:
    """Let Triton's interpreter take int() of arrays of one element, which NumPy 2.4 refuses."""
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr
        first = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        set_attribute(tensor, "__index__", first)

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    main()
