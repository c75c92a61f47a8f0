"""Folders of the format of the day, and what they must give when a later package reads them."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import moe_qlora
from moe_qlora.testing import model_class, tiny_inputs
from tools import corpus_entries as on_cpu

PACKED = {
    # folder: type, codec, sizes
    "packed": ("qwen3_moe", "double", {"hidden_size": 32, "moe_intermediate_size": 24}),
    "packed-int8": ("mixtral", "int8", {"hidden_size": 32, "intermediate_size": 24}),
    "packed-mxfp4": ("gpt_oss", "mxfp4", {"num_hidden_layers": 1}),
}
SERVERS = ("vllm", "sglang")
LAST = 4  # steps of training, of which the checkpoint has two


def write_fixtures(folder: Path) -> None:
    """Write the folders anew, with `numbers.json` of what they give."""
    on_cpu.quietly()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(folder):
        for name, (kind, codec, sizes) in PACKED.items():
            base = Path(scratch) / name
            on_cpu.write_base(kind, base, codec, **sizes)
            model = _load(name, base, quantization_config=on_cpu.quantization(codec))
            model.save_pretrained(name)
        model = _load("packed", "packed")  # names of folders in the files are relative ones
        model = moe_qlora.get_peft_model(model, on_cpu.lora(model))
        on_cpu.fill_adapter(model)
        model.save_pretrained("adapter")
        _train(model, scratch)
        shutil.copytree(Path(scratch) / "checkpoint-2", "checkpoint")
        Path("checkpoint/training_args.bin").unlink()  # the writer's paths, which nothing reads
        for server in SERVERS:
            moe_qlora.export_adapter("adapter", f"export-{server}", base="packed", target=server)
    numbers = json.dumps(read_fixtures(folder), indent=1)
    (folder / "numbers.json").write_text(numbers + "\n", encoding="utf-8")


def read_fixtures(folder: Path) -> dict[str, Any]:
    """Load, adapt, resume, merge and export the folders, and return numbers of it."""
    found: dict[str, Any] = {}
    _kernel = on_cpu.generic_kernel()
    with tempfile.TemporaryDirectory() as scratch:
        for name in PACKED:
            model = _load(name, folder / name)
            found[name] = on_cpu.state_hashes(model.state_dict())
            found[f"{name}: logits"] = _logits(model)
        model = moe_qlora.load_adapter(_load("packed", folder / "packed"), folder / "adapter")
        found["adapter: logits"] = _logits(model)
        model = PeftModel.from_pretrained(_load("packed", folder / "packed"), folder / "adapter")
        found["adapter by PEFT: logits"] = _logits(model)
        merged, packed = Path(scratch) / "merged", folder / "packed"
        moe_qlora.merge_adapter(packed, folder / "adapter", merged)
        found["merged"] = on_cpu.fingerprints(on_cpu.read_tensors(merged))
        for server in SERVERS:
            out, there = Path(scratch) / server, folder / f"export-{server}"
            moe_qlora.export_adapter(folder / "adapter", out, base=packed, target=server)
            for name, where in (("", out), (" as written", there)):
                tensors = on_cpu.read_tensors(where)
                found[f"export for {server}{name}"] = on_cpu.fingerprints(tensors)
        model = _load("packed", folder / "packed")
        model = moe_qlora.get_peft_model(model, on_cpu.lora(model))
        shutil.copytree(folder / "checkpoint", Path(scratch) / "run" / "checkpoint-2")
        resumed = _train(model, Path(scratch) / "run", resume=True)
        found["resumed: losses"] = {
            f"step {row['step']}": row["loss"] for row in resumed.state.log_history if "loss" in row
        }
        weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found["resumed: adapter"] = on_cpu.fingerprints(weights)
    return found


def _load(name: str, folder: str | Path, **options: Any) -> Any:
    kind, codec, _ = PACKED[name]
    with moe_qlora.enabled(keep_codes=codec == "mxfp4"):
        model = model_class(kind).from_pretrained(folder, dtype=torch.float32, **options)
    return on_cpu.settle(model)


def _logits(model: Any) -> Any:
    return on_cpu.fingerprint("logits", on_cpu.output(on_cpu.settle(model), tiny_inputs(model)))


def _train(model: Any, out: str | Path, resume: bool = False) -> Trainer:
    lots = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(5, 100, (8, 12), generator=lots)
    ]
    arguments = TrainingArguments(
        str(out), learning_rate=1e-2, seed=0, per_device_train_batch_size=2, max_steps=LAST,
        save_steps=2, logging_steps=1, report_to=[], disable_tqdm=True, optim="adamw_torch",
        use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(Path(out) / "checkpoint-2") if resume else None)
    return trainer
