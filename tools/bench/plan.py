"""Measures what `moe_qlora.plan` says: planned bytes against a GPU's own count; results/plan.csv.

    python tools/bench/plan.py                       every case, one GPU, about two minutes
    python tools/bench/plan.py --only olmoe          the cases whose name begins so

Each case packs a model with random weights on the device, trains it for three steps, and compares
memory after packing and its peak in training with plans from the configuration and the model.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import common
import torch
from bitsandbytes import nn as bnb
from bitsandbytes import optim
from common import Rows, allocated, parser_of, peak, recompute, release
from model import lora_config
from shapes import quantization, whole_config
from transformers import AutoModelForCausalLM
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import HfQuantizer

import moe_qlora
from moe_qlora.planning.plan import plan_settings

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


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW, "adamw_8bit": optim.AdamW8bit,
    "paged_adamw_8bit": optim.PagedAdamW8bit,
}  # fmt: skip


def main() -> None:
    """Run the cases that the command line asks for."""
    parser = parser_of(__doc__, "plan.csv")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for case in CASES:
        if case.model.startswith(options.only):
            torch.manual_seed(0)
            measure(case, options)


def measure(case: Case, options: argparse.Namespace) -> None:
    """Build, pack, plan, train, compare."""
    device = options.device
    config = whole_config(MODELS.get(case.model, case.model), layers=case.layers, tiny=options.tiny)
    config.vocab_size = config.vocab_size if options.tiny else case.vocabulary or config.vocab_size
    seq = 64 if options.tiny else case.seq
    setting = (
        f"layers={config.num_hidden_layers} seq={seq} batch={case.batch} lora={case.targets} r=16 "
        f"adapters={case.adapter_dtype} optimizer={case.optimizer} "
        f"checkpointing={'non-reentrant' if case.checkpointing else 'none'} "
        f"packed={'experts+linear' if case.linears else 'experts'} "
        f"{case.kind}{'' if case.kind == 'int8' else '+double'} vocab={config.vocab_size}"
    )
    rows = Rows(options, f"plan-{case.model}", setting)
    release(device, workspace=True)
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
    train(model, case, seq, device)
    for name, real, said in (
        ("packed weights", weights, planned.resident),
        ("peak in training", peak(device), planned.peak.nbytes),
    ):
        rows.add(f"{name}, measured", "bytes", real)
        rows.add(f"{name}, planned", "bytes", said)
        rows.add(f"{name}, error", "%", 100 * (said - real) / max(real, 1))


def build(config: Any, case: Case, device: torch.device) -> Any:
    """The model with random weights, packed; Linear layers as `from_pretrained` packs them."""
    int8 = case.kind == "int8"
    bnb_config = quantization(load_in_4bit=not int8, load_in_8bit=int8)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, bnb_config)
    if case.linears:
        linears: dict[str, Any] = dict(model.named_modules())
        skips = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        replace_with_bnb_linear(model, modules_to_not_convert=skips, quantization_config=bnb_config)
        for name, module in model.named_modules():
            if isinstance(module, bnb.Linear4bit):
                weight, module.bias = linears[name].weight, linears[name].bias
                form: Any = {"compress_statistics": True, "quant_type": "nf4"}
                packed = bnb.Params4bit(weight.data, requires_grad=False, **form)
                module.weight = packed.to(weight.device)
                module.weight.module = module
                linears[name].weight = None  # the 16-bit weight goes before the next one is packed
        model.is_loaded_in_4bit = True
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    release(device, workspace=True)
    return model


def train(model: Any, case: Case, seq: int, device: torch.device) -> None:
    """Train three steps."""
    if case.checkpointing:
        recompute(model)
    model.config.use_cache = False
    experts, wanted = moe_qlora.target_parameters(model), case.targets.split(",")
    lora = lora_config(model, experts, wanted, 16)
    if "all-linear" in wanted:
        lora.target_modules = "all-linear"
    model = moe_qlora.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(getattr(torch, case.adapter_dtype))
    optimizer, shape = OPTIMIZERS[case.optimizer](trained), (case.batch, seq)
    vocabulary = model.config.vocab_size
    release(device, workspace=True)
    common.train(model, optimizer, lambda _: torch.randint(vocabulary, shape, device=device), 3)


if __name__ == "__main__":
    main()
