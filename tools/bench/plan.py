"""Measures what `moe_qlora.plan` says: planned bytes against a GPU's own count; results/plan.csv.

    python tools/bench/plan.py                       every case, one GPU, about two minutes
    python tools/bench/plan.py --only olmoe          the cases whose name begins so
    python tools/bench/plan.py --tiny --device cpu   whether it runs at all (nothing is measured)

Each case builds a model with random weights on the device, packs it, trains it for three steps, and
compares `torch.cuda.memory_allocated` after packing and `max_memory_allocated` in training with a
plan made from the configuration alone, and with one made from the packed model.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import Rows, allocated, environment, parser_of, recompute, release
from shapes import quantization, whole_config

import moe_qlora
from moe_qlora.kernels.workspace import release_workspace
from moe_qlora.planning.plan import plan_settings

DTYPE = torch.bfloat16
MODELS = {"qwen3": "qwen3-30b-a3b", "gpt_oss": "gpt-oss-20b"}


@dataclass(frozen=True)
class Case:
    """One model and one way to train it."""

    model: str
    layers: int
    seq: int
    checkpointing: bool
    targets: str
    adapter_dtype: str = "float32"
    optimizer: str = "adamw"
    batch: int = 1
    linears: bool = False
    kind: str = "nf4"
    vocabulary: int = 0


CASES = (
    Case("qwen3", 16, 4096, True, "attention", "bfloat16"),
    Case("qwen3", 16, 4096, True, "attention,experts"),
    Case("qwen3", 16, 2048, False, "attention,experts", "bfloat16", "adamw_8bit"),
    Case("olmoe", 16, 4096, True, "all-linear", batch=2, linears=True),
    Case("olmoe", 16, 2048, False, "attention", linears=True),
    Case("gpt_oss", 8, 2048, True, "attention", linears=True),
    Case("gpt_oss", 8, 2048, False, "attention,experts", "bfloat16", "paged_adamw_8bit"),
    # A small vocabulary, so that the peak is a layer's and not the loss's.
    Case("qwen3", 8, 8192, True, "attention", "bfloat16", vocabulary=4096),
    Case("qwen3", 8, 8192, True, "attention,experts", vocabulary=4096),
    Case("olmoe", 8, 4096, True, "attention,experts", "bfloat16", kind="int8", vocabulary=4096),
)


def main() -> None:
    """Run the cases that the command line asks for."""
    parser = parser_of(__doc__, "plan.csv")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    where = environment(device, options.commit)
    for case in CASES:
        if case.model.startswith(options.only):
            torch.manual_seed(0)
            measure(case, device, options, where)


def measure(case: Case, device: torch.device, options: argparse.Namespace, where: Any) -> None:
    """Build, pack, plan, train, compare."""
    start = time.perf_counter()
    config = whole_config(MODELS.get(case.model, case.model), layers=case.layers, tiny=options.tiny)
    config.vocab_size = config.vocab_size if options.tiny else case.vocabulary or config.vocab_size
    config.dtype = DTYPE
    seq = 64 if options.tiny else case.seq
    setting = (
        f"layers={config.num_hidden_layers} seq={seq} batch={case.batch} lora={case.targets} r=16 "
        f"adapters={case.adapter_dtype} optimizer={case.optimizer} "
        f"checkpointing={'non-reentrant' if case.checkpointing else 'none'} "
        f"packed={'experts+linear' if case.linears else 'experts'} "
        f"{case.kind}{'' if case.kind == 'int8' else '+double'} vocab={config.vocab_size}"
    )
    print(f"\n{case.model}: {setting}", flush=True)
    rows = Rows(options.out, where, f"plan-{case.model}", setting)
    release_all(device)
    before = allocated(device)
    model = build(config, case, device)
    weights = allocated(device) - before
    same = ("batch", "targets", "adapter_dtype", "optimizer", "checkpointing")
    asked = {"seq": seq, **{name: getattr(case, name) for name in same}}
    gpus = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    planned = plan_settings(model, None, asked, gpus=gpus, search=False)
    if case.linears:
        from_config = plan_settings(config, None, asked, gpus=gpus, search=False)
        if from_config.peak != planned.peak:
            raise RuntimeError(f"two plans: {from_config.peak} and {planned.peak}")
    peak = train(model, case, seq, device)
    print(f"planned moment: {planned.peak.moment}; {time.perf_counter() - start:.0f} s")
    for name, real, said in (
        ("packed weights", weights, planned.resident),
        ("peak in training", peak, planned.peak.nbytes),
    ):
        rows.add(f"{name}, measured", "bytes", real)
        rows.add(f"{name}, planned", "bytes", said)
        rows.add(f"{name}, error", "%", 100 * (said - real) / max(real, 1))
    del model
    release_all(device)


def release_all(device: torch.device) -> None:
    release_workspace()  # the decoded experts' buffers: for the next layer, not for the next case
    release(device)


def build(config: Any, case: Case, device: torch.device) -> Any:
    """The model with random weights, packed."""
    from transformers import AutoModelForCausalLM

    int8 = case.kind == "int8"
    bnb_config = quantization(load_in_4bit=not int8, load_in_8bit=int8)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    moe_qlora.quantize_experts(model, bnb_config)
    if case.linears:
        _pack_linears(model, bnb_config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    release_all(device)
    return model


def _pack_linears(model: Any, bnb_config: Any) -> None:
    """What `from_pretrained` does to Linear layers, with the weights that are there."""
    import bitsandbytes as bnb
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    linears: dict[str, Any] = dict(model.named_modules())
    skips = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replace_with_bnb_linear(model, modules_to_not_convert=skips, quantization_config=bnb_config)
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = linears[name].weight
            module.weight = bnb.nn.Params4bit(
                weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            ).to(weight.device)
            module.weight.module = module
            module.bias = linears[name].bias
            linears[name].weight = None  # the 16-bit weight goes before the next one is packed
    model.is_loaded_in_4bit = True


def train(model: Any, case: Case, seq: int, device: torch.device) -> int:
    """Three steps; the peak."""
    from bitsandbytes import optim
    from peft import LoraConfig

    if case.checkpointing:
        recompute(model)
    model.config.use_cache = False
    words = case.targets.split(",")
    modules: Any = "all-linear" if "all-linear" in words else []
    if "attention" in words:
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = moe_qlora.target_parameters(model) if "experts" in words else None
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=modules, target_parameters=experts)
    wrapped = moe_qlora.get_peft_model(model, lora, autocast_adapter_dtype=False)
    wrapped.train()
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(getattr(torch, case.adapter_dtype))
    optimizers = {"adamw": torch.optim.AdamW, "adamw_8bit": optim.AdamW8bit}
    optimizer = {**optimizers, "paged_adamw_8bit": optim.PagedAdamW8bit}[case.optimizer](trained)
    release_all(device)
    for _ in range(3):
        ids = torch.randint(model.config.vocab_size, (case.batch, seq), device=device)
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
