"""Verdicts on what a server answers, and what is said where it does not start."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.cli.app import run
from moe_qlora.errors import CheckpointError, ConfigError
from moe_qlora.serving import check, vllm_worker
from moe_qlora.testing import tiny_model

BASE = [-1.0, -2.0, -3.0, -4.0]
ADAPTED = [-1.5, -1.5, -3.5, -3.0]


def verdict(served_base: list[float], served: list[float] | str) -> str:
    last = {"error": served} if isinstance(served, str) else {"logprobs": [served[:1], served[1:]]}
    runs = [{"logprobs": [served_base[:2], served_base[2:]]}, last]
    report = check.compare("vllm", (BASE, ADAPTED), {"version": "1", "runs": runs})
    assert report.ok == (report.verdict == "agrees") and report.tokens == 4
    return report.verdict


def shifted(values: list[float], by: float) -> list[float]:
    return [value + by * (-1) ** i for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("base", "adapted", "expected"),
    [
        (BASE, ADAPTED, "agrees"),
        (shifted(BASE, 0.02), shifted(ADAPTED, 0.05), "agrees"),  # within three times the noise
        (BASE, shifted(ADAPTED, 0.05), "off"),
        (shifted(BASE, 0.02), shifted(ADAPTED, 0.2), "off"),
        (BASE, BASE, "no effect"),
        (shifted(BASE, 0.02), shifted(BASE, 0.02), "no effect"),
        (shifted(BASE, 0.5), ADAPTED, "cannot tell"),
        (BASE, "ValueError: fused 3D\n weights", "not loaded"),
    ],
)
def test_verdicts(base: list[float], adapted: Any, expected: str) -> None:
    assert verdict(base, adapted) == expected


def test_the_report_says_how_far_off_it_is() -> None:
    runs = [{"logprobs": [shifted(BASE, 0.01)]}, {"logprobs": [shifted(ADAPTED, 0.5)]}]
    result = {"version": "9", "runs": runs, "experts_in_torch": True}
    report = check.compare("vllm", (BASE, ADAPTED), result)
    assert (report.noise, report.error) == (pytest.approx(0.01), pytest.approx(0.5))
    assert report.effect == pytest.approx(0.625)
    assert "vllm 9 serves something else than was trained" in str(report)
    assert "base 0.01, adapted 0.5" in str(report) and "plain torch" in str(report)


def test_our_own_logprobs_are_those_of_the_model(tmp_path: Path) -> None:
    """Token by token, each from a forward of what stands before it."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    prompts = [[5, 9, 33, 71], [7, 8]]
    without, same = check.local_logprobs(tmp_path, None, prompts, torch.float32, False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        for place in range(1, len(prompt)):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt[:place]])).logits[0, -1]
            expected.append(float(logits.log_softmax(-1)[prompt[place]]))
    assert without == pytest.approx(expected, abs=1e-4) and same == without


def test_servers_that_cannot_be_asked(tmp_path: Path) -> None:
    job = {"model": "x", "adapters": [], "prompts": [[1, 2]], "dtype": "float32", "rank": 8}
    with pytest.raises(ConfigError, match=r"python \(--python\) is /nowhere/python, which"):
        check.run_worker("vllm", job, tmp_path, "/nowhere/python", 60)
    if "vllm" not in sys.modules:
        with pytest.raises(ConfigError, match=r"cannot serve x: ModuleNotFoundError: .*'vllm'"):
            check.run_worker("vllm", job, tmp_path, None, 60)
    with pytest.raises(ConfigError, match=r"server is 'tgi'; give one of vllm, llama\.cpp"):
        moe_qlora.serve_check(tmp_path, tmp_path, server="tgi")
    with pytest.raises(ConfigError, match=r"llama_cpp \(--llama-cpp\) is None; name"):
        moe_qlora.serve_check(tmp_path, tmp_path, server="llama.cpp")
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="pass them as token ids"):
        check._token_ids(tmp_path, ["one text"])
    assert [len(ids) for ids in check._token_ids(tmp_path, None)] == [16] * 4
    for prompts in ([[5]], [[], [7]], []):
        with pytest.raises(ConfigError, match="prompts holds no prompt of two tokens or more"):
            check._token_ids(tmp_path, prompts)
    assert check._token_ids(tmp_path, [[5], [5, 9]]) == [[5, 9]]


@pytest.mark.parametrize(
    ("at", "verdict", "where"),
    [
        (0, "cannot tell", "the base here"),
        (1, "cannot tell", "the adapted model here"),
        (2, "cannot tell", "the base at the server"),
        (3, "off", "the adapted model at the server"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_logprobs_that_are_not_finite_are_named(
    at: int, verdict: str, where: str, value: float
) -> None:
    runs = [BASE, ADAPTED, BASE, ADAPTED]
    runs[at] = [value, *runs[at][1:]]
    served = [{"logprobs": [run]} for run in runs[2:]]
    report = check.compare("vllm", (runs[0], runs[1]), {"version": "1", "runs": served})
    assert report.verdict == verdict
    assert f"logprobs of {where} are not all finite" in str(report)
    assert "within the noise" not in str(report)


def test_ranks_are_those_that_vllm_takes() -> None:
    assert [vllm_worker.allowed_rank(rank) for rank in (1, 8, 9, 257, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(ValueError, match="rank is 513, and vLLM takes adapters up to rank 512"):
        vllm_worker.allowed_rank(513)


@pytest.mark.parametrize(("family", "slices"), [("qwen3_moe", 2), ("gpt_oss", 1), ("gpt_oss", 2)])
def test_experts_on_a_cpu_are_those_of_the_model(family: str, slices: int) -> None:
    """The product that stands in for vLLM's kernels, against transformers with W + B A."""
    model = tiny_model(family, initializer_range=0.2)
    module: Any = next(
        m for m in model.modules() if hasattr(m, "down_proj") and m.down_proj.ndim == 3
    )
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if family == "gpt_oss":  # which vLLM turns as it loads
        gate_up, down = gate_up.mT, down.mT
    experts, rows, hidden = gate_up.shape
    inner, rank, tokens = rows // 2, 3, 7
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 0.3

    # One slot of two holds the adapter; the other is another request's.
    a13 = [random(2, experts, rank, hidden) for _ in range(slices)]
    b13 = [random(2, experts, rows // slices, rank) for _ in range(slices)]
    a2, b2 = random(2, experts, rank, inner), random(2, experts, hidden, rank)
    slots = torch.tensor([1, 1, -1, 1, -1, 1, 1])
    context = SimpleNamespace(
        w13_lora_a_stacked=tuple(a13), w13_lora_b_stacked=tuple(b13),
        w2_lora_a_stacked=(a2,), w2_lora_b_stacked=(b2,),
        punica_wrapper=SimpleNamespace(token_lora_indices=slots),
    )  # fmt: skip
    x, output = random(tokens, hidden), torch.empty(tokens, hidden)
    chosen = torch.rand(tokens, experts, generator=draw).topk(2).indices
    weights = torch.rand(tokens, 2, generator=draw)

    def silu_and_mul(_: Any, out: torch.Tensor, pre: torch.Tensor) -> None:
        gate, up = pre.chunk(2, -1)
        out.copy_(nn.functional.silu(gate) * up)

    kernels = SimpleNamespace(
        _lora_context=context, activation=silu_and_mul,
        w1_bias=getattr(module, "gate_up_proj_bias", None),
        w2_bias=getattr(module, "down_proj_bias", None),
    )  # fmt: skip
    act = SimpleNamespace(value="swigluoai" if family == "gpt_oss" else "silu")
    with torch.no_grad():
        vllm_worker._experts(kernels, output, x, gate_up, down, weights, chosen, act)
        deltas = [b[1] @ a[1] for a, b in zip(a13, b13, strict=True)]
        joined = deltas[0]
        if slices == 2:
            both = torch.stack(deltas, 2 if family == "gpt_oss" else 1)
            joined = both.flatten(1, 2)
        adapted = {"gate_up_proj": gate_up + joined, "down_proj": down + b2[1] @ a2[1]}
        for lora in (False, True):
            plain = {"gate_up_proj": gate_up, "down_proj": down}
            for name, weight in (adapted if lora else plain).items():
                turned = weight.mT if family == "gpt_oss" else weight
                setattr(module, name, nn.Parameter(turned.contiguous()))
            expected = module(x, chosen, weights)
            here = (slots == 1) == lora
            torch.testing.assert_close(output[here], expected[here], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ignores", "expected"), [(False, "agrees"), (True, "no effect")])
@pytest.mark.filterwarnings("ignore:.*experts of this model are not packed")
@pytest.mark.filterwarnings("ignore:stock PEFT rewrites the target_modules")
def test_a_check_from_end_to_end(
    ignores: bool, expected: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A server that loads the exported folder with this package, and one that drops adapters."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_model("qwen3_moe", initializer_range=0.2).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [param.name for param in moe_qlora.detect(model)]
    config = LoraConfig(r=2, target_parameters=names, init_lora_weights=False)
    adapted = moe_qlora.get_peft_model(model, config, unpacked_ok=True)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    adapted.save_pretrained(adapter)

    def server(name: str, job: Any, work: Path, python: Any, timeout: float) -> dict[str, Any]:
        (folder,) = job["adapters"]
        keys = load_file(Path(folder) / "adapter_model.safetensors")
        assert any(".experts.0.gate_proj.lora_A" in key for key in keys)
        assert (name, job["rank"], python) == ("vllm", 2, "some/python")
        plain, served = check.local_logprobs(
            Path(job["model"]), Path(folder), job["prompts"], torch.float32, False
        )
        return {
            "version": "0",
            "runs": [{"logprobs": [plain]}, {"logprobs": [plain if ignores else served]}],
        }

    monkeypatch.setattr(check, "run_worker", server)
    arguments = [
        "serve-check",
        str(base),
        str(adapter),
        "--with",
        "vllm",
        "--python",
        "some/python",
    ]
    with pytest.raises(SystemExit) as ended:
        run(args=[*arguments, "--dtype", "float32"])
    assert ended.value.code == (1 if ignores else 0)
    out = capsys.readouterr().out
    assert ("serves the base" if ignores else "vllm 0 serves what was trained") in out
    report = moe_qlora.serve_check(
        base, adapter, server="vllm", python="some/python", dtype=torch.float32
    )
    assert report.verdict == expected
