"""vLLM's own engine computes the trained model from an exported adapter (nightly, where it is)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.testing import requires_gpu, tiny_model

WIDE = {"hidden_size": 64, "head_dim": 32, "initializer_range": 0.2, "norm_topk_prob": True}
PROMPT = [5, 9, 3, 7, 8, 2, 30, 12]


@requires_gpu()
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_vllm_computes_what_was_trained(tmp_path: Path, family: str) -> None:
    vllm: Any = pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest

    tiny_model(family, **WIDE).save_pretrained(tmp_path / "base")
    load: Any = AutoModelForCausalLM.from_pretrained
    model = moe_qlora.get_peft_model(
        load(tmp_path / "base", dtype=torch.float32),
        LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        experts=True,
        unpacked_ok=True,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    moe_qlora.export_adapter(
        tmp_path / "adapter", tmp_path / "served", base=tmp_path / "base", target="vllm"
    )
    engine = vllm.LLM(
        str(tmp_path / "base"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, enable_lora=True, max_lora_rank=8, enable_prefix_caching=False,
    )  # fmt: skip
    request = LoRARequest("adapter", 1, str(tmp_path / "served"))
    for lora, ours in ((None, model.get_base_model()), (request, model)):
        with torch.no_grad(), model.disable_adapter() if lora is None else torch.no_grad():
            logits = ours(input_ids=torch.tensor([PROMPT])).logits[0]
        for place in range(1, len(PROMPT)):  # prompt_logprobs ignore the adapter: ask one by one
            asked = vllm.SamplingParams(
                temperature=0.0, max_tokens=1, logprob_token_ids=[PROMPT[place]], detokenize=False
            )
            given = {"prompt_token_ids": PROMPT[:place]}
            (answer,) = engine.generate([given], asked, lora_request=lora, use_tqdm=False)
            served = answer.outputs[0].logprobs[0][PROMPT[place]].logprob
            wanted = float(logits[place - 1].log_softmax(-1)[PROMPT[place]])
            assert served == pytest.approx(wanted, abs=1e-2)
