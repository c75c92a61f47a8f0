"""The subcommands that read and write folders: quantize, verify, merge, export and report."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..errors import ConfigError, one_line
from ..layout import human_bytes, name_pattern
from ..progress import Progress, reporting
from . import options as opt
from . import render

if TYPE_CHECKING:
    from ..checkpoint.verify import VerifyReport, WeightError

DAMAGED = 1
Storage = StrEnum("Storage", ["uint8", "bfloat16", "float16", "float32"])
Server = StrEnum("Server", ["vllm", "sglang", "gguf", "peft"])  # as in serving/servers.json
EXAMPLES = (
    "moe-qlora quantize ./model ./model-nf4",
    "moe-qlora quantize ./model ./packed --quant int8 --device cpu",
    "moe-qlora verify ./model-nf4",
    "moe-qlora verify ./model-nf4 --against ./model",
    "moe-qlora merge ./model ./adapter ./merged",
    "moe-qlora merge ./model ./adapter ./merged --like-training",
    "moe-qlora export ./adapter --base ./model --for vllm -o ./served",
    "moe-qlora export ./served --base ./model --for peft -o ./again",
    "moe-qlora report ./model-nf4 --against ./model",
    "moe-qlora report ./my-run --text train.jsonl -o run.html",
)
_NEW = "New folder; nothing is overwritten."


def _bar(quiet: bool, source: object, done: str) -> AbstractContextManager[Progress]:
    shown = not quiet and sys.stderr.isatty()
    return reporting(shown, f"Reading {source}", done, stderr=True, transient=True)


def quantize(
    src: str = opt.argument("SRC", "Checkpoint folder (safetensors), 16-bit or as published."),
    dst: str = opt.argument("DST", _NEW),
    quant: opt.Quant = opt.option("What to pack to.", default=opt.Quant.nf4),
    double_quant: bool = opt.option("Quantize the statistics as well.", default=True),
    compute_dtype: opt.Float = opt.option("Of packed layers.", default=opt.Float.bfloat16),
    storage: Storage = opt.option("How 4-bit codes are stored.", default=Storage.uint8),
    skip: list[str] = opt.option("A module to leave in 16 bit; may be repeated.", default=()),
    dtype: opt.Float | None = opt.option("Of what is not packed; default: as in SRC."),
    device: str | None = opt.option("Where to pack; default: a GPU where there is one."),
    max_shard_size: str = opt.option("Of the files of DST.", default="5GB"),
    trust_remote_code: opt.Remote = False,
    quiet: opt.Quiet = False,
) -> None:
    """Pack a checkpoint without ever holding the model.

    DST loads in seconds: `with moe_qlora.enabled(): AutoModelForCausalLM.from_pretrained(DST)`.
    """
    with _bar(quiet, src, "Packed") as tell:
        import torch

        from ..checkpoint.save import quantize_checkpoint
        from ..packing.settings import CodecSettings

        dtypes = getattr(torch, storage), getattr(torch, compute_dtype)
        settings = CodecSettings(quant.value, double_quant, *dtypes, skip_modules=tuple(skip))
        manifest = quantize_checkpoint(
            src, dst, settings.bnb_fields(), dtype=getattr(torch, dtype) if dtype else None,
            device=device, max_shard_size=max_shard_size, progress=tell,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    total = human_bytes(sum(shard["nbytes"] for shard in manifest.shards.values()))
    packed = f"{len(manifest.experts)} expert weights packed to {manifest.codec['kind']}"
    typer.echo(f"{dst}: {packed}, {total} in {_files(len(manifest.shards))}.")


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def merge(
    base: str = opt.argument("BASE", "Checkpoint folder: 16-bit, as published, or packed."),
    adapter: str = opt.argument("ADAPTER", "Folder that PEFT saved the adapter to."),
    out: str = opt.argument("OUT", _NEW),
    dtype: opt.Float | None = opt.option("Of the merged weights; default: each as it is in BASE."),
    like_training: bool = opt.flag("--like-training", "Round BASE first as training rounded it."),
    quant: opt.Quant | None = opt.option("With --like-training: a packed type that no file tells."),
    double_quant: bool = opt.flag("--double-quant", "With --quant: the statistics too."),
    skip: list[str] = opt.option("With --quant: a module in 16 bit; may be repeated.", default=()),
    max_shard_size: str = opt.option("Of files, if BASE is packed or quantized.", default="5GB"),
    any_base: opt.AnyBase = False,
    trust_remote_code: opt.Remote = False,
    quiet: opt.Quiet = False,
) -> None:
    """Merge a LoRA adapter into its base, a few experts at a time; no model is ever loaded.

    OUT has the original layout of the checkpoint, so that whatever loads BASE's original loads it.
    """
    if quant is None and (double_quant or skip):
        raise ConfigError("--double-quant and --skip go with --quant; give the packed type.")
    with _bar(quiet, base, "Merged") as tell:
        import torch

        from ..checkpoint.merge import merge_adapter
        from ..packing.settings import CodecSettings

        config = quant and CodecSettings(quant.value, double_quant, skip_modules=tuple(skip))
        report = merge_adapter(
            base, adapter, out, dtype=getattr(torch, dtype) if dtype else None,
            like_training=like_training, quantization_config=config and config.bnb_fields(),
            max_shard_size=max_shard_size, any_base=any_base, trust_remote_code=trust_remote_code,
            progress=tell,
        )  # fmt: skip
    typer.echo(report)


def export(
    adapter: str = opt.argument("ADAPTER", "Folder of the adapter, in any layout."),
    base: str = opt.option("Folder of the model it was trained on.", metavar="BASE", default=...),
    target: Server = opt.option("The server that is to load it.", "--for", default=...),
    out: str = opt.option(_NEW, "-o", "--out", metavar="OUT", default=...),
    any_base: opt.AnyBase = False,
    trust_remote_code: opt.Remote = False,
) -> None:
    """Write a LoRA adapter in the layout that a server takes for its architecture.

    gguf is the folder that llama.cpp's convert_lora_to_gguf.py takes; peft is PEFT's own layout.
    """
    with render.working("Exporting"):
        from ..serving.export import export_adapter

        report = export_adapter(
            adapter, out, base=base, target=target.value, any_base=any_base,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    typer.echo(report)


def report(
    source: str = opt.argument("FOLDER_OR_RUN", "Checkpoint, adapter, Trainer's run, or MODEL."),
    out: Path = opt.option("HTML file to write.", "--out", "-o", default=Path("report.html")),
    against: Path | None = opt.option("Folder it was packed from, for the error of packing."),
    text: Path | None = opt.option("JSONL or text file whose experts are counted."),
    base: str | None = opt.option("Model of an adapter or run that names none that is here."),
    batch: int | None = opt.option("", hidden=True),
    seq: int | None = opt.option("", hidden=True),
    max_tokens: int = opt.option("Most tokens of --text.", default=16384),
    quant: opt.ModelQuant = None,
    double_quant: opt.ModelDoubleQuant = None,
    trust_remote_code: opt.Remote = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write a page with bytes by part, experts, packing error, routing, and the curves of a run.

    It is one file for any browser, without scripts and network. Ends with 0, and with 2 where
    something cannot be read.
    """
    from ..report.write import write_report

    missing = write_report(
        source, out, against=against, text=text, base=base, max_tokens=max_tokens, batch=batch,
        seq=seq, quantization_config=opt.packed_as(None, quant, double_quant),
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    added = {"Packing error": "--against", "Routing": "--text", "Training": "a Trainer's run"}
    without = ", ".join(f"{part.lower()} ({added.get(part, '--base')})" for part in missing)
    size = out.expanduser().stat().st_size / 1024
    typer.echo(f"{out.expanduser()}: {size:.0f} KiB{', without ' * bool(without)}{without}.")


def verify(
    folder: Path = opt.argument("FOLDER", "Checkpoint folder, packed by moe-qlora or plain."),
    against: Path | None = opt.option("Folder it was packed from, for the error of packing."),
    as_json: opt.Json = False,
    trust_remote_code: opt.Remote = False,
    quiet: opt.Quiet = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Check a checkpoint's files, checksums, shapes and statistics; nothing is written to it.

    Ends with 0 where all is well, with 1 where something is damaged (named on stderr, or in the
    JSON), and with 2 where FOLDER is no checkpoint or a setting cannot be followed.
    """
    with _bar(quiet, folder, "Checked") as tell:
        from ..checkpoint.verify import verify as check

        found = check(folder, against, trust_remote_code=trust_remote_code, progress=tell)
    if as_json:
        render.print_json(found.as_dict())
    else:
        for kind, sentences in (("warning", found.warnings), ("damaged", found.problems)):
            for sentence in sentences:
                sys.stderr.write(one_line(kind, sentence))
        _show(found, render.console(color.value))
    if not found.good:
        raise typer.Exit(DAMAGED)


def _show(found: VerifyReport, out: Console) -> None:
    if found.good:
        what, more = f"packed as {found.kind}", ""
        if found.kind != "plain":
            more = f"; {found.experts} expert weights, {found.linears} Linear layers packed"
        elif found.dequantized:
            more = f"; {found.dequantized} weights are codes, and are read dequantized"
        if found.method or found.kind == "plain":
            what = f"quantized by its maker ({found.method})" if found.method else "plain"
        count = f"{found.tensors} tensors in {_files(found.files)}, {human_bytes(found.nbytes)}"
        render.say(out, f"{found.folder} is whole: {what}, {count}{more}.", "green")
    alike: dict[str, list[WeightError]] = {}
    for error in found.errors:
        alike.setdefault(name_pattern(error.name), []).append(error)
    rows = []
    for pattern, errors in alike.items():
        worst = max(errors, key=lambda error: max(error.experts))
        most, mean = max(worst.experts), sum(error.relative for error in errors) / len(errors)
        where = [f"* = {n}" for n in re.findall(r"(?<=\.)\d+(?=\.)", worst.name)]
        where += [f"expert {worst.experts.index(most)}"] * worst.expert
        rows.append((pattern, str(len(errors)), f"{mean:.2%}", f"{most:.2%}", ", ".join(where)))
    if rows:
        headings = ("parameter", ">count", ">error", ">worst", "where")
        title = f"{found.folder}: error of {found.kind}, relative (Frobenius)"
        render.show_table(out, title, headings, rows)
