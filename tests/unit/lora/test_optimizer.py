"""`lora.optimizer.AdamW` against torch's; without a GPU, its kernels run in the interpreter."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronizing import no_synchronizing
from torch import Tensor, nn

pytest.importorskip("triton")
from moe_qlora.kernels import adamw as kernel
from moe_qlora.lora import optimizer as module
from moe_qlora.lora.optimizer import AdamW

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(1,), (7,), (1023,), (4097,), (3, 8), (2, 16, 4)]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """The kernels serve tensors of the CPU too; how many tensors each launch had."""
    counts: list[int] = []
    update = kernel.update

    def counted(kind: Any, tables: Any, *rest: Any) -> None:
        update(kind, tables, *rest)
        counts.append(len(tables.rows))

    monkeypatch.setattr(kernel, "update", counted)
    monkeypatch.setattr(module, "_works", True)
    if not torch.cuda.is_available():
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(module, "_is_on_device", lambda p: True)
    return counts


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(dtype: torch.dtype = FP32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in shapes]


def set_grads(seed: int, *copies: list[nn.Parameter], skip: Any = ()) -> None:
    """New gradients, the same in each copy."""
    torch.manual_seed(seed)
    for i, every in enumerate(zip(*copies, strict=True)):
        grad = torch.randn(every[0].shape)
        for p in every:
            p.grad = None if i in skip else grad.to(DEVICE, p.dtype, copy=True)


def groups(params: list[nn.Parameter], **of_first: Any) -> list[dict[str, Any]]:
    return [{"params": params[:2], **of_first}, {"params": params[2:]}]


def assert_same(ours: AdamW, torchs: torch.optim.Optimizer) -> None:
    for group, other in zip(ours.param_groups, torchs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            # The interpreter cuts what it converts to bf16, which five steps add up.
            bf16 = p.dtype == BF16
            close = {"rtol": 2**-5 if bf16 else 1e-4, "atol": 2**-6 if bf16 else 1e-5}
            torch.testing.assert_close(p, q, **close)
            mine, its = ours.state[p], torchs.state[q]
            assert [*mine] == [*its]
            for name in mine:
                assert mine[name].dtype == its[name].dtype
                assert mine[name].device == its[name].device
                torch.testing.assert_close(mine[name], its[name], **close)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_as_torch(dtype: torch.dtype, decay: float, launches: list[int]) -> None:
    """Groups of other rates, rates that change, gradients that are not there or move."""
    mine, its = parameters(dtype), parameters(dtype)
    options = {"lr": 1e-2, "weight_decay": decay, "betas": (0.8, 0.99), "fused": True}
    ours = AdamW(groups(mine, lr=1e-3), **options)
    torchs = torch.optim.AdamW(groups(its, lr=1e-3), **options)
    for i in range(5):
        set_grads(i, mine, its, skip={1: [0, 3], 2: [3]}.get(i, ()))
        versions = [p._version for p in mine]
        with torch.no_grad():
            assert ours.step() is torchs.step() is None
        moved = [p._version > v for p, v in zip(mine, versions, strict=True)]
        assert moved == [p.grad is not None for p in mine]
        for optimizer in (ours, torchs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        assert_same(ours, torchs)
    assert launches == [2, 4, 1, 3, 2, 3, 2, 4, 2, 4]


def test_mixed_dtypes(launches: list[int]) -> None:
    mine = parameters(BF16, SHAPES[:3]) + parameters(FP32, SHAPES[3:])
    its = [nn.Parameter(p.detach().clone()) for p in mine]
    mine += [nn.Parameter(torch.randn(5, device=DEVICE, dtype=torch.float64))]
    its += [nn.Parameter(mine[-1].detach().clone())]
    ours, torchs = AdamW(mine, fused=True), torch.optim.AdamW(its, fused=True)
    for i in range(3):
        set_grads(i, mine, its)
        ours.step()
        torchs.step()
    assert_same(ours, torchs)
    assert launches == [3, 3] * 3  # and torch's step for the one in fp64


def test_in_place_gradients_use_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    tabulate, to_device = kernel.tabulate, kernel.to_device
    monkeypatch.setattr(kernel, "tabulate", lambda rows, d: made.append(1) or tabulate(rows, d))
    monkeypatch.setattr(kernel, "to_device", lambda n, d: made.append(0) or to_device(n, d))
    mine = parameters()
    ours = AdamW(mine, fused=True)
    set_grads(0, mine)
    ours.step()
    made.clear()
    ours.step()
    assert made == []
    keep = [p.grad for p in mine]
    set_grads(1, mine)
    ours.step()
    assert made in ([0], [1, 0, 0, 0])  # The latter where another gradient is not aligned
    del keep, made[:]
    mine[0].data = mine[0].data.clone()
    ours.step()
    assert made[0] == 1


def test_tensors_that_change(launches: list[int]) -> None:
    """What lies elsewhere is found again; what no longer fits is torch's."""
    mine, its = parameters(), parameters()
    ours, torchs = AdamW(mine, fused=True), torch.optim.AdamW(its, fused=True)
    for i in range(3):
        set_grads(i, mine, its)
        if i == 1:
            for p in mine:
                ours.state[p] = {k: t.clone() for k, t in ours.state[p].items()}
        if i == 2:  # Its first elements alone, at the same addresses
            for optimizer, params in ((ours, mine), (torchs, its)):
                p, state = params[2], optimizer.state[params[2]]
                p.grad, p.data = None, p.data[:10]
                p.grad = torch.ones(10, device=DEVICE)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name][:10]
        ours.step()
        torchs.step()
        assert_same(ours, torchs)
    assert launches == [6, 6, 6]
    state = ours.state[mine[4]]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    ours.step()
    assert launches[3:] == [5]
    (plan,) = ours._plans.values()
    assert len(plan.left) == 1 and plan.left[0] is mine[4]


@pytest.mark.parametrize("there", [True, False])
def test_state_dicts_go_to_torch_and_back(there: bool, launches: list[int]) -> None:
    """`there`: whether torch's is fused."""
    mine, its, third = parameters(), parameters(), parameters()
    ours = AdamW(groups(mine, lr=0.1), fused=True)
    torchs = torch.optim.AdamW(groups(its, lr=0.1), fused=True if there else None)
    set_grads(0, mine, its, third)
    torchs.step()
    with torch.no_grad():
        for p, q in zip(mine, its, strict=True):
            p.copy_(q)
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert all(group["fused"] for group in ours.param_groups)
    ours.step()
    torchs.step()
    assert launches == [2, 4]
    assert_same(ours, torchs)
    again = torch.optim.AdamW(groups(third), fused=True)
    again.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for p, q in zip(third, mine, strict=True):
            p.copy_(q)
    again.step()
    ours.step()
    assert_same(ours, again)


def test_loaded_groups_keep_what_was_chosen() -> None:
    mine, its = parameters(), parameters()
    torchs = torch.optim.AdamW(its, foreach=True)
    set_grads(0, mine, its)
    torchs.step()
    ours = AdamW(mine, fused=True)
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["foreach"] and not ours.param_groups[0]["fused"]


def test_copies_have_no_tables(launches: list[int]) -> None:
    mine = parameters()
    ours = AdamW(mine, fused=True)
    set_grads(0, mine)
    ours.step()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301
        assert ours._plans and not other._plans
        assert "_plans" not in ours.__getstate__()
        params = other.param_groups[0]["params"]
        set_grads(1, mine, params)
        before = copy.deepcopy(mine)
        other.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, before, strict=True))
        assert not any(torch.equal(p, q) for p, q in zip(mine, params, strict=True))
        assert [other.state[p]["step"].item() for p in params] == [2] * len(params)
    assert launches == [6, 6, 6]


def test_a_closure_is_called_once_and_first(launches: list[int]) -> None:
    (p,) = parameters(shapes=[(4,)])
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = (p * p).sum()
        loss.backward()
        return loss

    for optimizer in (AdamW([p], fused=True), AdamW([p], fused=False)):
        p.grad = None
        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss.item() > 0 and optimizer.state[p]["step"].item() == 1
    assert calls == [True, True] and launches == [1]


@pytest.mark.parametrize("torchs", [False, True])
def test_hooks_run_once(torchs: bool) -> None:
    """Also where torch's step has its hooks already, and where it does a part."""
    if torchs:
        torch.optim.AdamW(parameters())
        torch.optim.Adam(parameters())
    mine = [*parameters(), nn.Parameter(torch.randn(5, device=DEVICE, dtype=torch.float64))]
    ours = AdamW(mine, fused=True)
    seen: list[Any] = []
    ours.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", len(args))))
    ours.register_step_post_hook(
        lambda o, args, kwargs: seen.append(("after", len(o.param_groups[0]["params"])))
    )
    for i, may in enumerate((True, False)):
        ours.grad_scale = None if may else torch.ones((), device=DEVICE)
        ours.found_inf = None if may else torch.zeros((), device=DEVICE)
        set_grads(i, mine)
        ours.step()
        assert seen == [("before", 1), ("after", len(mine))]
        seen.clear()


def test_a_scheduler_changes_the_rate() -> None:
    mine, its = parameters(), parameters()
    ours, torchs = AdamW(mine, fused=True), torch.optim.AdamW(its, fused=True)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)) for o in (ours, torchs)
    ]
    for i in range(3):
        set_grads(i, mine, its)
        ours.step()
        torchs.step()
        for schedule in schedules:
            schedule.step()
    assert_same(ours, torchs)


@pytest.mark.parametrize("inf", [0.0, 1.0])
def test_a_scaler_is_served_by_torch(inf: float, launches: list[int]) -> None:
    mine, its = parameters(), parameters()
    ours, torchs = AdamW(mine, fused=True), torch.optim.AdamW(its, fused=True)
    for i in range(2):
        set_grads(i, mine, its)
        for optimizer in (ours, torchs):
            optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
            optimizer.found_inf = torch.tensor(inf, device=DEVICE)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        assert_same(ours, torchs)
    assert launches == []


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-2)}, {"fused": False},
     {"fused": None, "foreach": True}, {"fused": None, "foreach": False}],
)  # fmt: skip
def test_other_options_are_torchs(options: dict[str, Any], launches: list[int]) -> None:
    mine, its = parameters(), parameters()
    options = {"fused": True, **options}
    ours, torchs = AdamW(mine, **options), torch.optim.AdamW(its, **options)
    for i in range(2):
        set_grads(i, mine, its)
        ours.step()
        torchs.step()
    assert_same(ours, torchs)
    assert launches == []


def test_an_error_of_torchs_step_leaves_all_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [*parameters(), nn.Parameter(torch.randn(5, device=DEVICE, dtype=torch.float64))]
    ours = AdamW(groups(mine), fused=True)
    set_grads(0, mine)
    grads = [p.grad for p in mine]

    def fails(self: Any, closure: Any = None) -> None:
        assert [len(group["params"]) for group in self.param_groups] == [0, 1]
        raise RuntimeError("torch's")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(RuntimeError, match="torch's"):
        ours.step()
    assert all(p.grad is grad for p, grad in zip(mine, grads, strict=True))
    assert [len(group["params"]) for group in ours.param_groups] == [2, len(mine) - 2]


@pytest.mark.parametrize("name", ["advance", "update"])
def test_a_kernel_that_does_not_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, its = parameters(), parameters()
    ours, torchs = AdamW(groups(mine), fused=True), torch.optim.AdamW(groups(its), fused=True)
    tries = []

    def fails(*args: Any) -> None:
        tries.append(1)
        raise RuntimeError("ptxas")

    def step(i: int) -> None:
        set_grads(i, mine, its)
        ours.step()
        torchs.step()
        assert_same(ours, torchs)

    step(0)
    monkeypatch.setattr(kernel, name, fails)
    with pytest.warns(UserWarning, match="does not compile .RuntimeError: ptxas") as said:
        step(1)
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(2)
    assert len(tries) == 1


@pytest.mark.parametrize("capturing", [True, False])
def test_nothing_is_launched_in_a_capture(
    capturing: bool, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = parameters()
    ours = AdamW(mine, fused=True)
    set_grads(0, mine)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    ours.step()
    assert launches == ([] if capturing else [6])
    assert ours.state[mine[0]]["step"].item() == 1


def test_compiled_code_calls_torchs_step(launches: list[int]) -> None:
    mine, its = parameters(), parameters()
    ours, torchs = AdamW(mine, fused=True), torch.optim.AdamW(its, fused=True)
    for optimizer in (ours, torchs):
        step = torch.compile(optimizer.step, backend="eager")
        set_grads(0, mine, its)
        step()
    assert_same(ours, torchs)
    assert launches == []


class Wrapped(Tensor):
    """Another type of tensor."""


def test_what_the_kernel_does_not_take(launches: list[int]) -> None:
    plain, grad = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    takes: Callable[[Tensor, Tensor], bool] = module._may_take
    assert takes(plain, grad) and takes(nn.Parameter(plain), grad.half())
    assert not takes(plain.as_subclass(Wrapped), grad)
    assert not takes(plain, grad.as_subclass(Wrapped))
    assert not takes(plain.double(), grad.double())
    assert not takes(torch.eye(3), torch.eye(3).to_sparse())
    assert not takes(torch.zeros(2, 3).t(), torch.zeros(3, 2))
    assert not takes(torch.zeros(3, 2), torch.zeros(2, 3).t())
    assert not takes(torch.zeros(1).expand(4), grad)


def test_a_sparse_gradient_is_torchs_error() -> None:
    (p,) = parameters(shapes=[(3, 3)])
    p.grad = torch.eye(3, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW([p], fused=True).step()


def test_parameters_of_another_device_are_torchs(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_on_device", lambda p: p.is_cuda)
    mine = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    ours = AdamW(mine)
    assert ours.defaults["fused"] is None and not hasattr(ours, "_step_supports_amp_scaling")
    for p in mine:
        p.grad = torch.ones(4)
    ours.step()
    ours = AdamW(mine, fused=True)
    ours.step()
    assert launches == [] and ours.state[mine[0]]["step"].item() == 1


def test_added_groups_and_added_parameters(launches: list[int]) -> None:
    mine, its = parameters(), parameters()
    ours, torchs = (o(p[:2], fused=True) for o, p in ((AdamW, mine), (torch.optim.AdamW, its)))
    for i in range(3):
        set_grads(i, mine, its)
        if i:
            ours.add_param_group({"params": mine[2 * i : 2 * i + 2], "lr": 0.1})
            torchs.add_param_group({"params": its[2 * i : 2 * i + 2], "lr": 0.1})
        ours.step()
        torchs.step()
        assert_same(ours, torchs)
    assert launches == [2, 2, 2, 2, 2, 2]


def test_groups_that_are_gone_are_forgotten(launches: list[int]) -> None:
    mine, others = parameters(FP32), parameters(FP32)
    ours = AdamW([{"params": mine}, {"params": others}])
    set_grads(0, mine)
    set_grads(0, others)
    ours.step()
    kept = weakref.ref(others[0])
    del ours.param_groups[1]
    ours.state.clear()
    del others
    ours.step()
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_the_same_as_torchs_up_to_a_rounding(dtype: torch.dtype, launches: list[int]) -> None:
    """torch 2.11 rounds one number in some 4,000 to another neighbour."""
    eps = torch.finfo(dtype).eps
    shapes = [*SHAPES, (128, 768, 16), (1500, 2049)]
    mine, its = parameters(dtype, shapes), parameters(dtype, shapes)
    ours, torchs = AdamW(groups(mine, lr=1e-2)), torch.optim.AdamW(groups(its, lr=1e-2), fused=True)
    assert ours.defaults["fused"] and ours._step_supports_amp_scaling
    for i in range(10):
        set_grads(i, mine, its)
        ours.step()
        torchs.step()
        for p, q in zip(mine, its, strict=True):
            pairs = [(p, q), *((ours.state[p][name], t) for name, t in torchs.state[q].items())]
            for here, there in pairs:
                torch.testing.assert_close(here, there, rtol=2 * eps, atol=8 * eps)
                assert dtype == FP32 or here.numel() < 100 or (here == there).float().mean() > 0.98
            q.data.copy_(p)  # Differences are not to add up
            for name, t in torchs.state[q].items():
                t.copy_(ours.state[p][name])
    assert launches == [2, 6] * 10


@pytest.mark.gpu
def test_a_step_does_not_synchronize() -> None:
    mine = parameters(BF16)
    ours = AdamW(mine)
    set_grads(0, mine)
    ours.step()
    set_grads(1, mine)
    with no_synchronizing():
        ours.step()
        mine[0].data = mine[0].data.clone()
        ours.step()


@pytest.mark.gpu
def test_a_capture_is_torchs(launches: list[int]) -> None:
    mine = parameters()
    ours = AdamW(mine, capturable=True)
    set_grads(0, mine)
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    graph.replay()
    assert ours.state[mine[0]]["step"].item() == 2 and launches == []
