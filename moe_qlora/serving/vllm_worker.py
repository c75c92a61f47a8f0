"""Run prompts through vLLM, as a separate program in vLLM's environment.

    python vllm_worker.py JOB RESULT

JOB is a JSON file: `model` (a folder), `adapters` (folders), `prompts` (lists of token ids),
`dtype`, `rank` (the largest of the adapters), `mixed` (vLLM's `enable_mixed_moe_lora_format`).
RESULT gets the version, vLLM's names of expert layers, and for the base (first) and each adapter
either the logprobs of all prompt tokens but the first ones, or vLLM's error.

This package is not needed in that environment: the file imports only vLLM and torch. vLLM has LoRA
on experts for GPUs only (Triton kernels); on a CPU the experts are computed here in plain torch,
from the buffers that vLLM's loader has filled. Everything else is vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's values of max_lora_rank


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"runs": []}
    try:
        _run(job, result)
    except Exception as error:  # noqa: BLE001 - reported by the caller
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _run(job: dict[str, Any], result: dict[str, Any]) -> None:
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    result["version"] = vllm.__version__
    result["experts_in_torch"] = current_platform.is_cpu()
    if current_platform.is_cpu():
        _compute_experts_in_torch()
    longest = max(map(len, job["prompts"]))
    engine = vllm.LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=longest + 1,
        max_num_seqs=8,
        enable_lora=bool(job["adapters"]),
        max_lora_rank=allowed_rank(job["rank"]),
        enable_mixed_moe_lora_format=job["mixed"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        limit_mm_per_prompt=job.get("limits"),
    )
    if job["adapters"]:
        result["layout"] = engine.apply_model(_expert_layout)[0]
    requests = [None]
    for number, folder in enumerate(job["adapters"], 1):
        three_d = job["mixed"]
        requests.append(LoRARequest(f"adapter{number}", number, folder, is_3d_lora_weight=three_d))
    for request in requests:
        try:
            result["runs"].append({"logprobs": _logprobs(engine, job["prompts"], request)})
        except Exception as error:  # noqa: BLE001 - one adapter that does not load is an answer
            traceback.print_exc()
            result["runs"].append({"error": f"{type(error).__name__}: {error}"})


def _logprobs(engine: Any, prompts: list[list[int]], request: Any) -> list[list[float]]:
    from vllm import SamplingParams

    # Sampled tokens only: vLLM's prompt logprobs ignore the adapter of each token.
    inputs: list[Any] = []
    sampling = []
    for prompt in prompts:
        for place in range(1, len(prompt)):
            inputs.append({"prompt_token_ids": prompt[:place]})
            wanted = {"max_tokens": 1, "logprob_token_ids": [prompt[place]], "detokenize": False}
            sampling.append(SamplingParams(temperature=0.0, **wanted))
    outputs = iter(engine.generate(inputs, sampling, lora_request=request, use_tqdm=False))
    return [
        [next(outputs).outputs[0].logprobs[0][token].logprob for token in prompt[1:]]
        for prompt in prompts
    ]


def allowed_rank(rank: int) -> int:
    """Return vLLM's smallest `max_lora_rank` for this rank.

    Raises:
        ValueError: There is none.
    """
    allowed = next((one for one in _MAX_RANKS if one >= rank), None)
    if allowed is None:
        raise ValueError(
            f"the adapter's rank is {rank}, and vLLM takes adapters up to rank {_MAX_RANKS[-1]}."
        )
    return allowed


def _expert_layout(model: Any) -> dict[str, Any]:
    """Return the adapter layout of vLLM's LoRA manager for this model."""
    manager = model.lora_manager
    names = manager.packed_modules_mapping.get("experts", [])
    return {
        "three_d": bool(getattr(manager, "_is_3d_moe_model", False)),
        "expert_names": names[:3],
        "modules": sorted(manager.modules),
        "packed": {
            key: value for key, value in manager.packed_modules_mapping.items() if key != "experts"
        },
    }


def _compute_experts_in_torch() -> None:
    """Replace vLLM's Triton experts, its choice for LoRA, by plain torch."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = _experts


def _experts(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Compute `output` (tokens, hidden) expert by expert, LoRA included, as vLLM's kernels do."""
    import torch

    context = self._lora_context
    slots: Any = context.punica_wrapper.token_lora_indices if context is not None else None
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        inputs = hidden_states[rows]
        hidden = _plus_bias(inputs @ w1[expert].T, self.w1_bias, expert)
        if context is not None:
            a, b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
            parts = _lora(inputs, slots[rows], a, b, expert)
            if len(parts) == 2 and activation.value == "swigluoai":
                hidden = hidden + torch.stack(parts, -1).flatten(1)
            else:
                hidden = hidden + torch.cat(parts, -1)
        inner = _activated(self, activation, hidden, w2.shape[-1])
        result = _plus_bias(inner @ w2[expert].T, self.w2_bias, expert)
        if context is not None:
            a, b = context.w2_lora_a_stacked, context.w2_lora_b_stacked
            result = result + torch.cat(_lora(inner, slots[rows], a, b, expert), -1)
        scale = topk_weights[rows, choices].float().unsqueeze(1)
        total.index_add_(0, rows, result.float() * scale)
    output.copy_(total)


def _lora(inputs: Any, slots: Any, a_stacked: Any, b_stacked: Any, expert: int) -> list[Any]:
    """Return B A x of each slice with each token's adapter; zeros without one."""
    import torch

    parts = []
    for a, b in zip(a_stacked, b_stacked, strict=True):
        part = torch.zeros(len(inputs), b.shape[2], dtype=inputs.dtype)
        for slot in set(slots.tolist()) - {-1}:
            here = slots == slot
            part[here] = inputs[here] @ a[slot, expert].T @ b[slot, expert].T
        parts.append(part)
    return parts


def _plus_bias(product: Any, bias: Any, expert: int) -> Any:
    return product if bias is None else product + bias[expert]


def _activated(self: Any, activation: Any, hidden: Any, width: int) -> Any:
    """Apply vLLM's activation; for gpt-oss, which vLLM has for GPUs only, its formula."""
    if activation.value == "swigluoai":
        limit, alpha = 7.0, 1.702
        gate = hidden[:, ::2].clamp(max=limit)
        up = hidden[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * (gate * alpha).sigmoid()
    inner = hidden.new_empty(len(hidden), width)
    self.activation(activation, inner, hidden.contiguous())
    return inner


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # an engine that failed to start may wait for its threads for ever
