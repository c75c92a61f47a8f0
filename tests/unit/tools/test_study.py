"""The study: its order of runs, its rounding to MXFP4, a run of each kind in small, its tables."""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mxfp4 import slow_decode

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module")
def study():
    """Return the study's modules by name."""
    sys.path.insert(0, str(TOOLS))
    names = ("corpus", "grid", "codecs", "train", "worker", "finish", "tables", "plot")
    yield {name: importlib.import_module(f"study.{name}") for name in names}
    sys.path.remove(str(TOOLS))


def test_a_cut_off_leaves_whole_blocks(study):
    jobs = study["grid"].jobs()
    assert len({job.key for job in jobs}) == len(jobs)
    tuned = [job for job in jobs if job.kind == "tune"]
    first = [(job.seed, job.codec) for job in tuned[:18]]
    assert first == [(seed, codec) for seed in range(3) for codec in study["grid"].CODECS]
    assert all(job.targets == "both" and job.rank == 16 for job in tuned[:18])
    kinds = {(job.codec, job.targets, job.experts) for job in tuned}
    assert ("mxfp4", "attention", "all") in kinds and ("nf4", "experts", "hot-25") in kinds


def test_rounding_to_mxfp4_takes_the_nearest_code(study):
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, 0, :32] = 0
    blocks, scales = study["codecs"].to_mxfp4(weight)
    decoded = slow_decode(blocks, scales)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([-values, values])
    for part, got, scale in zip(
        weight.float().view(-1, 32), decoded.view(-1, 32), scales.view(-1), strict=True
    ):
        if not bool(part.any()):
            assert not bool(got.any())
            continue
        assert 2.0 ** (int(scale) - 127) == 2.0 ** (int(part.abs().max().log2().floor()) - 2)
        grid = values * 2.0 ** (int(scale) - 127)
        nearest = (part[:, None] - grid).abs().min(-1).values
        assert torch.equal((part - got).abs(), nearest)


def test_passages_of_the_held_out_files_that_are_trained_on_are_found(study):
    repeated = study["corpus"].repeated
    tokens = np.random.default_rng(0).integers(0, 4096, 500).astype(np.uint16)
    held = np.concatenate([tokens[100:140], tokens[:31], tokens[468:], tokens[::-1][:97]])
    assert repeated(tokens, held) == (40 + 32) / 200
    assert repeated(tokens, tokens) == 1.0
    assert repeated(tokens[:5], held) == 0.0


def test_the_page_holds_the_tables_of_its_rows(study):
    folder = TOOLS / "study"
    page = (folder / "README.md").read_text(encoding="utf-8")
    blocks = study["tables"].tables(folder / "results")
    assert all(block and block in page for block in blocks.values())
    images = [f"results/{name}.svg" for name in study["plot"].PLOTS]
    assert all(f"({image})" in page and (folder / image).exists() for image in images)


def test_only_runs_of_the_same_seed_are_compared(study):
    rows = [
        {"seed": seed, "codec": codec, "targets": "both", "rank": 16.0, "experts": "all",
         "rate": 1.0, "length": 1.0, "text_before": 4.0, "text_after": loss}
        for seed, codec, loss in ((0, "bf16", 2.0), (1, "bf16", 3.0), (2, "bf16", 2.5),
                                  (2, "nf4", 2.75), (1, "nf4", 3.125), (3, "nf4", 9.0))
    ]  # fmt: skip
    tables = study["tables"]
    exact, packed = tables.by_seed(rows, codec="bf16"), tables.by_seed(rows)
    assert tables.paired(packed, exact) == [0.125, 0.25]
    assert tables.shares(packed, exact) == [87.5, 100 * 1.25 / 1.5]
    assert sorted(tables.over_all_settings(rows, "nf4", "bf16")) == [0.125, 0.25]
    assert tables.said([0.125, 0.25], 2, signed=True) == "+0.19 (+0.12 to +0.25)"


def test_groups_are_tenths_by_rarity(study):
    rarity = torch.rand(7, 20, generator=torch.Generator().manual_seed(0)).numpy()
    groups = study["finish"]._groups(rarity)
    assert np.bincount(groups.ravel()).tolist() == [14] * 10
    for group in range(9):
        assert rarity[groups == group].max() <= rarity[groups == group + 1].min()


def test_runs_of_each_kind_end_in_rows_and_a_page(study, tmp_path, monkeypatch):
    train, grid, plot = study["train"], study["grid"], study["plot"]
    monkeypatch.setattr(train, "TOY", replace(train.TOY, base_steps=3, steps=4, held_rows=4))
    generator = np.random.default_rng(0)
    tokens = {n: generator.integers(0, 4096, 900).astype(np.uint16)
              for n in ("code", "code_held", "text", "text_held")}  # fmt: skip
    np.savez(tmp_path / "corpus.npz", **tokens)
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    options = argparse.Namespace(
        work=work, out=out, corpus=tmp_path / "corpus.npz", deadline=time.time() + 300,
        base_seconds=60.0, device="cpu", toy=True,
    )  # fmt: skip
    worker = study["worker"].Worker(options)
    jobs = [job for job in grid.jobs() if job.seed == 0 and job.rate == job.length == 1]
    wanted = [("both", "all", c) for c in ("bf16", "mxfp4")]
    wanted += [("experts", e, "nf4") for e in ("hot-25", "by use", "random-25")]
    todo = [j for j in jobs if j.kind in ("base", "errors")]
    todo += [j for j in jobs if j.kind == "tune" and (j.targets, j.experts, j.codec) in wanted
             and j.rank == 16]  # fmt: skip
    todo.append(replace(todo[-1], codec="no such"))
    for job in todo:
        worker._attempt(job)
    study["finish"].finish(work, out)

    def rows(name):
        with (out / f"{name}.csv").open() as stream:
            return list(csv.DictReader(stream))

    runs = rows("runs")
    assert len(runs) == 5 and len(rows("base")) == 1
    assert len(rows("experts")) == 5 * 2 * 8
    assert len(rows("tokens")) == 2 * 2 * 10
    (failure,) = rows("failures")
    assert failure["codec"] == "no such" and failure["error"]
    trained = {row["experts"]: int(row["trained"]) for row in runs if row["targets"] == "experts"}
    assert trained["hot-25"] * 4 == trained["by use"]  # as many as r = 16 on all experts

    monkeypatch.setattr(plot, "sys", argparse.Namespace(argv=["plot", str(out)]))
    plot.main()
    page = (out / "README.md").read_text()
    assert "| MXFP4 |" in page and "| experts | hot-25 |" in page
    assert {"codecs.svg", "errors.svg", "tokens.svg"} <= {file.name for file in out.iterdir()}
