"""Writes moe_qlora/docs/how-fast.md, and the speeds in README.md, from results/*.csv.

    python tools/bench/how_fast.py

A table shows one run: rows of one commit, measured on one machine one after the other. Prose is
here, figures come from the rows. After new rows, name their commit here and run it again: `WHOLE`
says which rows, and in which setting, stand for the whole model here and in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from additions import KINDS
from pages import (
    DOCS,
    Run,
    fill_readme,
    find,
    gigabytes,
    page,
    rows_of,
    source,
    table,
    three_digits,
    write,
)
from pages import whole as whole_number

PAGE = DOCS / "how-fast.md"
BENCH = "../../tools/bench"
QWEN = "qwen3-30b-a3b"
NAMES = {
    "ours": "this package: nf4 experts, LoRA on attention and experts",
    "frozen": "bf16 experts, LoRA on attention alone",
    "unsloth bf16": "Unsloth, bf16 experts, LoRA on attention and experts",
    "unsloth nf4+double": "Unsloth, nf4 experts, LoRA on attention and experts",
    "e4b": "experts4bit-qlora, nf4 experts, LoRA on attention and experts",
}
"""What the tables of whole models call a row, by its `peer`."""

ATTENTION = "this package: nf4 experts, LoRA on attention alone"
"""What they call the row of `alike`."""

INTRO = (
    """
A table is one run on NVIDIA H200s: one program after the other, with the GPU to itself. Runs differ
in commit, machine and versions, so compare only within a table, and only rows of one commit.
Weights and tokens are random, which leaves routing even. Speeds are medians of the timed steps. GB
are 10^9 bytes, and a peak is `torch.cuda.max_memory_allocated`.
""",
    f"""
`python tools/bench/how_fast.py` writes this page from the rows in `tools/bench/results`;
[tools/bench]({BENCH}/README.md) has the commands of each run. Unless a table names others: torch
2.11.0, triton 3.6.0, transformers 5.23.0, peft 0.21.2, bitsandbytes 0.50.2, sequences of 4,096
tokens, LoRA of rank 16 in bf16.
""",
)

WORDS = """
## Settings

- **bf16 experts, LoRA on attention alone** is transformers and PEFT without this package: frozen
  16-bit experts, computed by transformers' grouped matmul. It trains fewer weights than the other
  rows do.
- **Checkpointing** keeps only the input of each layer, and computes the layer again in backward.
- **Liger**: [Liger-Kernel](https://github.com/linkedin/Liger-Kernel)'s norms, rotary embedding and
  loss in chunks.
- **Graphs**: decoder layers recorded as CUDA graphs, for sequences of one length.
- **Fused AdamW**: `optim="adamw_torch_fused"`.
"""

WHOLE = "efaceb6"
"""Commit of the table of all 48 layers."""

LIMITED = "a86cc53"
"""Commit of the table of micro-batch 1, fitted to several limits."""

LONG = "efaceb6"
"""Commit of 32,768 tokens, fitted to 80 GiB."""

UNSLOTH = "ecfbbe4"
"""Commit of Unsloth's runs of all 48 layers, at micro-batch 1."""

KEPT = "checkpointing=none"
CHECKPOINTED = "checkpointing=unsloth"

FITTED = "checkpointing=fit with=liger-loss,merge-lora,compile,graphs{},adamw_fused"

OWN_ADAMW = ("efaceb6",)
"""Commits whose fitted rows have an AdamW of this package, removed since."""

SETTINGS = {
    "recorded": dict.fromkeys(
        [(peer, batch) for peer in ("ours", "frozen") for batch in (1, 4)],
        "with=liger,graphs,adamw_fused",
    ),
    "fitted": {
        ("ours", 1): FITTED.format(""),
        ("ours", 4): FITTED.format(",expandable-segments") + " memory=55.8GiB",
        ("frozen", 1): "checkpointing=none with=liger-loss,compile,adamw_fused",
        ("frozen", 4): "checkpointing=non-reentrant with=liger-loss,compile,adamw_fused",
    },
}
"""What the rows of each setting have, by peer and micro-batch: `fit_table.py` measures "fitted"."""

SAID = (
    "Every run has torch.compile and a loss in chunks; this package has `prepare_training` and an "
    "AdamW of its own, removed since, and is fitted to 60 GB at micro-batch 4, where bf16 "
    "recomputes every layer"
)
"""What the page and README.md say of the table's setting."""

LIMITS = ("28GiB", "24GiB")
"""Memory that micro-batch 1 was fitted to."""


def whole(
    commit: str, batch: int, seq: int = 4096, kind: str = "recorded"
) -> list[tuple[str, Run]]:
    """The runs of Qwen3-30B-A3B's 48 layers with all additions, in a setting of `SETTINGS`."""
    return [
        (peer, _whole(commit, peer, batch, seq, words, [] if "memory" in words else ["memory"]))
        for peer, words in ((peer, SETTINGS[kind][peer, batch]) for peer in ("ours", "frozen"))
    ]


def _whole(
    commit: str, peer: str, batch: int, seq: int, words: str, without: Sequence[str] = (),
    lora: str = "",
) -> Run:  # fmt: skip
    lora = lora or ("experts,attention" if peer == "ours" else "attention")
    if peer == "ours" and commit in OWN_ADAMW:
        words = words.replace("adamw_fused", "own_adamw")
    words += f" layers=48 seq={seq} batch={batch} lora={lora} peer={peer}"
    return find("model.csv", commit, QWEN, words, ["generate", "data", *without])


def of_table(batch: int) -> list[tuple[str, Run]]:
    """The runs of `WHOLE`."""
    return whole(WHOLE, batch, kind="fitted")


def alike() -> Run:
    """The run of `WHOLE` that trains what bf16's trains, at micro-batch 1."""
    return _whole(WHOLE, "ours", 1, 4096, FITTED.format(""), ["memory"], lora="attention")


def fitted() -> Iterator[str]:
    """The part on memory and speed."""
    yield "Ours at micro-batch 1, by the memory that it was fitted to:"
    words = FITTED.format(",expandable-segments")
    runs = {"all that is free": dict(whole(LIMITED, 1, kind="fitted"))["ours"]}
    runs |= {
        f"{limit[:-3]} GiB": _whole(LIMITED, "ours", 1, 4096, f"{words} memory={limit}")
        for limit in LIMITS
    }
    rows = [
        (limit, *(whole_number(run.p50[metric]) for metric in KINDS.values()),
         *(gigabytes(run.p50[metric]) for metric in ("planned peak", "peak in training")),
         gigabytes(run.p50["reserved in training"]), run.speed)
        for limit, run in runs.items()
    ]  # fmt: skip
    sizes = ("planned peak", "peak", "reserved")
    yield table(("memory", *KINDS.values(), *sizes, "tokens/s"), rows)
    yield source(runs.values())


def gpu_of(run: Run) -> str:
    """The GPU of a run, in words."""
    name, _, size = run.where["gpu"].removeprefix("NVIDIA ").partition(" ")
    return f"{name} of {size.split('GB')[0]} GB" if size else name


def eight() -> list[tuple[str, Run]]:
    """The runs of 8 layers, ours and four peers."""
    words = {name: f"peer={name.replace('-', ' ')}" for name in NAMES}
    return [
        (name, find("model.csv", "5f0f82d", QWEN, f"layers=8 {word}"))
        for name, word in words.items()
    ]


def plain(commit: str, batch: int) -> list[tuple[str, Run]]:
    """The runs of 48 layers without any addition."""
    words = f"layers=48 seq=4096 batch={batch}"
    return [
        (peer, find("model.csv", commit, QWEN, f"{words} peer={peer}", ["with", "liger"]))
        for peer in ("ours", "frozen")
    ]


def models_table(runs: list[tuple[str, Run]]) -> str:
    """Memory and speed of whole models, a row each."""
    rows = (
        (NAMES.get(name, name), gigabytes(run.p50["model"]), run.peak, run.speed, run.spread)
        for name, run in runs
    )
    header = ("experts and LoRA", "model", "peak", "tokens/s", "20th to 80th percentile")
    return table(header, rows)


def shown(runs: list[tuple[str, Run]], title: str, note: str = "") -> Iterator[str]:
    """A titled table of whole models, and the rows that it shows."""
    yield title
    yield models_table(runs)
    yield source([run for _, run in runs], note)


def whole_models() -> Iterator[str]:
    """The part on Qwen3-30B-A3B."""
    yield "## Qwen3-30B-A3B, all 48 layers"
    yield f"{SAID}."
    yield from shown([*of_table(1), (ATTENTION, alike())], "Micro-batch 1:")
    yield from shown(of_table(4), "Micro-batch 4:")
    yield from fitted()
    again = "One sequence of 32,768 tokens, with Liger, graphs and fused AdamW, computed again:"
    yield from shown(whole("5f0f82d", 1, 32768), again)
    words = f"{FITTED.format(',expandable-segments')} memory=80GiB"
    long = _whole(LONG, "ours", 1, 32768, words)
    yield (
        f"Ours with the fastest setting above, fitted to 80 GiB: {long.speed} tokens/s at "
        f"{long.peak}, {gigabytes(long.p50['reserved in training'])} reserved. {source([long])}"
    )
    yield from unsloth()
    yield "### Without Liger, graphs and fused AdamW"
    text = "Micro-batch 4, stock loss, checkpointing, torch's AdamW:"
    yield from shown(plain("ecb58ce", 4), text)


def unsloth() -> Iterator[str]:
    """The part on Unsloth's training of all layers."""
    yield "### All 48 layers by Unsloth"
    runs = [
        (f"Unsloth, {experts} experts, {how}", _unsloth(experts, words))
        for experts in ("bf16", "nf4+double")
        for how, words in (("all kept", KEPT), ("its own checkpointing", CHECKPOINTED))
    ]
    best = max((run for _, run in runs), key=lambda run: run.p50["throughput"])
    ours = dict(whole(LIMITED, 1, kind="fitted"))["ours"]
    yield (
        "LoRA on attention and experts, micro-batch 1, fused AdamW, and Unsloth's own defaults, "
        "such as 4-bit Linear layers and fp32 adapters, with transformers "
        f"{best.where['transformers']}. On another H200, of the limits above, this package makes "
        f"{ours.speed} tokens/s in {ours.peak}; Unsloth's best here is {best.speed} in "
        f"{best.peak}. Its 8 layers, further down, took less time each, so the GPU may have waited "
        "for this machine's host. PEFT's LoRA on bf16 experts, compiled, ran out of the H200's "
        "memory with all activations kept."
    )
    rows = [
        (what, gigabytes(run.p50["model"]), run.peak, run.speed, run.spread) for what, run in runs
    ]
    yield table(("", "model", "peak", "tokens/s", "20th to 80th percentile"), rows)
    yield source([run for _, run in runs])


def _unsloth(experts: str, words: str) -> Run:
    return find("model.csv", UNSLOTH, QWEN, f"layers=48 {words} {experts} peer=unsloth")


def eight_layers() -> Iterator[str]:
    """The part on five packages."""
    yield "## Five ways to train 8 layers of Qwen3-30B-A3B"
    yield (
        "Eight layers, so that every way fits, micro-batch 1, fused AdamW. The loss over 151,936 "
        "tokens is a third of the time, so these are no speeds of the whole model. The first two "
        "rows have Liger and graphs; experts4bit-qlora has Liger and cannot be recorded. Unsloth "
        "has its own defaults, such as compiled kernels and checkpointing, transformers "
        f"{eight()[2][1].where['transformers']} and adapters in fp32, and was measured in its "
        "second run. Its 4-bit model packs the Linear layers too; the other rows leave these in "
        "bf16."
    )
    yield models_table(eight())
    yield source([run for _, run in eight()])
    yield (
        "axolotl's rows have no speed: its model compiled and tuned kernels for 190 s beside other "
        "processes and for 90 s alone, and had not finished its first step."
    )


def other_models() -> Iterator[str]:
    """The part on other models."""
    yield "## Other models"
    yield (
        "Whole models, checkpointed but where fitted, fused AdamW. GLM-4.5-Air's 106 billion "
        "weights do not fit the GPU in bf16. Liger has only its loss for it. gpt-oss-20b is "
        "computed with flex attention; with transformers' default, which is eager, it makes "
        f"{eager_gpt_oss().speed} tokens/s with a peak of {eager_gpt_oss().peak}."
    )
    cases = (
        ("gpt-oss-20b", "24 layers, Liger", "5f0f82d", 1, "attention=flex_attention", True),
        ("gpt-oss-20b", "24 layers, Liger", "5f0f82d", 4, "attention=flex_attention", True),
        ("gpt-oss-20b", "24 layers, fitted", "418a5a7", 4, "checkpointing=fit", False),
        ("mixtral-8x7b", "32 layers, Liger, graphs", "b9240de", 1, "layers=32", True),
        ("glm-4.5-air", "46 layers, Liger's loss, graphs", "b9240de", 1, "layers=46", False),
    )
    rows = []
    for name, what, commit, batch, words, fits in cases:
        ours = find("model.csv", commit, name, f"{words} batch={batch} peer=ours")
        theirs = ["-", "-"]
        if fits:
            run = find("model.csv", commit, name, f"{words} batch={batch} peer=frozen")
            source([ours, run])  # of one run
            theirs = [run.peak, run.speed]
        rows.append((name, what, batch, ours.peak, ours.speed, *theirs, commit))
    header = ("model", "setting", "micro-batch", "ours: peak", "tokens/s")
    yield table((*header, "bf16, LoRA on attention: peak", "tokens/s", "commit"), rows)
    yield (
        "Rows: [model.csv](../../tools/bench/results/model.csv), 2026-11-23 and 24, one NVIDIA "
        "H200, each line one run."
    )


def eager_gpt_oss() -> Run:
    """gpt-oss-20b as transformers loads it."""
    words = "layers=24 batch=1 peer=ours with=liger,adamw_fused"
    return find("model.csv", "5f0f82d", "gpt-oss-20b", words, ["attention"])


LAYERS = (
    (QWEN, "3d1899a", (4096, 16384)),
    ("gpt-oss-20b", "3229181", (4096, 16384)),
    ("glm-4.5-air", "3229181", (4096, 16384)),
    ("deepseek-v3", "f4af5fe", (4096,)),
    ("deepseek-v3", "3d1899a", (16384,)),
    ("mixtral-8x7b", "4f1a9cb", (16384,)),
)


def layer(name: str, commit: str, tokens: int, peer: str) -> Run:
    """The run of one layer."""
    return find("layer.csv", commit, name, f"tokens={tokens} peer={peer}", ["part", "cap"])


def layer_row(run: Run) -> list[str]:
    """Times in ms, and memory in MiB."""
    times = [run.p50.get(metric) for metric in ("forward", "step", "step, checkpointed")]
    sizes = (run.p50["kept"], run.p50["peak"])
    return [*map(three_digits, times), *map(whole_number, sizes)]


def layers() -> Iterator[str]:
    """The part on one layer of experts."""
    yield "## One layer of experts"
    yield (
        "Milliseconds of a forward, of a step (forward and backward to the input, the routing "
        "weights and the adapters), and of a checkpointed step; MiB kept between forward and "
        'backward, and MiB at the peak of a step. "Ours" trains LoRA on both projections of nf4 '
        'experts; "bf16" is frozen experts by transformers\' grouped matmul.'
    )
    header = ("model", "tokens", "experts", "forward", "step", "step, checkpointed", "kept", "peak")
    rows = []
    for name, commit, sizes in LAYERS:
        for tokens in sizes:
            runs = [layer(name, commit, tokens, peer) for peer in ("ours", "frozen")]
            source(runs)  # of one run
            for what, run in zip(("ours", "bf16"), runs, strict=True):
                dated = (commit, run.where["date"])
                rows.append((name, f"{tokens:,}", what, *layer_row(run), *dated))
    yield table((*header, "commit", "date"), rows)
    yield "Rows: [layer.csv](../../tools/bench/results/layer.csv), NVIDIA H200, each pair one run."
    yield "### Beside PEFT and bitsandbytes"
    yield (
        "A step of Qwen3-30B-A3B's layer in milliseconds, by tokens. PEFT trains its LoRA on bf16 "
        "experts; bitsandbytes dequantizes packed experts, and trains none. This run has older "
        "kernels of ours. With few tokens the time is the host's."
    )
    peers = ("ours", "frozen", "peft", "bnb")
    counts = (256, 1024, 4096, 16384, 32768)
    grid = {(t, p): layer(QWEN, "88efafc", t, p) for t in counts for p in peers}
    lines = [(f"{t:,}", *(three_digits(grid[t, p].p50["step"]) for p in peers)) for t in counts]
    yield table(("tokens", "ours", "bf16, frozen", "bf16, PEFT", "bitsandbytes, frozen"), lines)
    yield source(grid.values())
    yield "Beside experts4bit-qlora 0.58.1, the same layer:"
    pairs = [(t, p, layer(QWEN, "4f1a9cb", t, p)) for t in (4096, 16384) for p in ("ours", "e4b")]
    called = {"ours": "ours", "e4b": "experts4bit-qlora"}
    yield table(header[1:], [(f"{t:,}", called[p], *layer_row(run)) for t, p, run in pairs])
    yield source([run for _, _, run in pairs])


GPU_RUNS = (
    ("b8777de", "single", "16", "", "one GPU"),
    ("b8777de", "ddp", "16", "", "DDP"),
    ("b8777de", "whole", "16", "no reshard", "FSDP2, layers kept whole after forward"),
    ("b8777de", "whole", "16", "", "FSDP2"),
    ("c54903d", "fsdp2", "48", "", "FSDP2, all 48 layers"),
)
"""Commit, engine, layers, a word of the note, and what the table says."""


def many_gpus() -> Iterator[str]:
    """The part on two GPUs."""
    yield "## Two GPUs"
    yield (
        "Qwen3-30B-A3B, LoRA on attention and experts, micro-batch 4 on each GPU, checkpointing, "
        "stock loss, without Liger and graphs. Tokens/s are of both GPUs together; the model and "
        "the peak are of one. Compare lines of one commit. "
        f"[many_gpus.md]({BENCH}/many_gpus.md) extrapolates to more GPUs."
    )
    rows = []
    for commit, engine, count, word, what in GPU_RUNS:
        row = _gpu_row(commit, engine, count, word)
        sizes = (f"{float(row[key]):.1f} GB" for key in ("model_gb", "train_peak_gb"))
        speed = whole_number(float(row["tokens_per_s"]))
        rows.append((what, row["gpus"], count, *sizes, speed, commit, row["date"]))
    header = ("engine", "GPUs", "layers", "model", "peak", "tokens/s", "commit", "date")
    yield table(header, rows)
    yield "Rows: [two_gpu.csv](../../tools/bench/results/two_gpu.csv), NVIDIA H200s of one machine."


def _gpu_row(commit: str, engine: str, layers: str, word: str) -> dict[str, str]:
    asked = {
        "commit": commit,
        "engine": engine,
        "layers": layers,
        "model": QWEN,
        "micro_batch": "4",
    }
    found = [
        row
        for row in rows_of("two_gpu.csv")
        if asked.items() <= row.items() and ("no reshard" in row["note"]) == bool(word)
    ]
    if len(found) != 1:
        raise LookupError(f"two_gpu.csv: {len(found)} rows of {asked}")
    return found[0]


def in_short() -> str:
    """The figures to take away."""
    (_, ours), (_, frozen) = of_table(1)
    runs = dict(eight())
    theirs, packed = runs["unsloth bf16"], runs["unsloth nf4+double"]
    return (
        f"On one {gpu_of(ours)}, all of Qwen3-30B-A3B, packed, trains LoRA on attention and "
        f"experts at {ours.speed} tokens/s in {ours.peak}. With frozen bf16 experts and LoRA on "
        f"attention alone, it makes {frozen.speed} tokens/s in {frozen.peak}. {SAID}. "
        f"On one H200, eight layers of it make {runs['ours'].speed} tokens/s in "
        f"{runs['ours'].peak}, Unsloth's {packed.speed} in {packed.peak} with 4-bit experts and "
        f"{theirs.speed} in {theirs.peak} with bf16 experts, each with settings of its own."
    )


def text() -> str:
    """The page."""
    parts = (whole_models, eight_layers, other_models, layers, many_gpus)
    intro = (" ".join(paragraph.split()) for paragraph in INTRO)
    pieces = (piece for part in parts for piece in part())
    return page("# How fast", in_short(), *intro, WORDS, *pieces)


def readme_block() -> str:
    """The speeds that README.md shows."""
    short = (
        "this package, nf4 experts",
        "bf16 experts, LoRA on attention alone",
        "Unsloth, bf16 experts",
    )
    names = (*short, "Unsloth, nf4 experts", "experts4bit-qlora")
    pairs = zip(names, of_table(1), of_table(4), strict=False)
    large = [(name, a.peak, a.speed, b.peak, b.speed) for name, (_, a), (_, b) in pairs]
    same = alike()
    large.append(("this package, LoRA on attention alone", same.peak, same.speed, "", ""))
    small = [(n, run.peak, run.speed) for n, (_, run) in zip(names, eight(), strict=True)]
    header = ("Qwen3-30B-A3B, 48 layers", "peak", "tokens/s", "micro-batch 4: peak", "tokens/s")
    commit = eight()[0][1].where["commit"]
    return page(
        f"One {gpu_of(of_table(1)[0][1])}, sequence 4,096, LoRA on attention and experts "
        f"but where a row says less. {SAID} (commit {WHOLE}):",
        table(header, large, space=""),
        f"One H200, eight layers, each program with settings of its own (commit {commit}):",
        table(("8 layers", "peak", "tokens/s"), small, space=""),
        "[How fast](moe_qlora/docs/how-fast.md) names every setting, and has more models.",
    )


def main() -> None:
    """Write the page and README's block."""
    write(PAGE, text())
    fill_readme("how-fast", readme_block())


if __name__ == "__main__":
    main()
