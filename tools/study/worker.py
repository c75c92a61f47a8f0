"""One process of the study: takes jobs from the common list until none is left, or time is up.

    PYTHONPATH=tools python -m study.worker --work DIR --out DIR --corpus FILE --deadline UNIX_TIME

A job is taken by creating a file of its name, which one process alone can. What fails is a row of
failures.csv, and the next job is taken.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moe_qlora

from . import codecs, errors, train
from .grid import Job, jobs
from .records import append, where
from .train import Data, OutOfTimeError

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
USE_BATCHES = 16


class Worker:
    """Runs jobs; `seconds` are what the last runs took."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work: Path = options.work
        self.out: Path = options.out
        self.deadline: float = options.deadline
        self.base_seconds: float = options.base_seconds
        self.device = torch.device(options.device)
        self.scale = train.TOY if options.toy else train.Scale()
        self.corpus = hashlib.sha256(options.corpus.read_bytes()).hexdigest()
        self.data = Data.read(options.corpus, self.scale, self.device)
        self.seconds: dict[str, float] = {}

    def loop(self, limit: int | None = None) -> None:
        """Take and run jobs until there are none, or there is no time for another."""
        todo = jobs()[:limit]
        while todo:
            job = next((job for job in todo if self._ready(job)), None)
            if job is None:  # waiting for a base
                if time.time() > self.deadline:
                    return
                time.sleep(0.2)
                todo = [job for job in todo if not self._is_dead(job)]
                continue
            todo.remove(job)
            expected = 1.1 * self.seconds.get(job.kind, 0.0) * job.length
            if time.time() + expected > self.deadline:
                continue  # a shorter one may fit
            if self._claim(job):
                self._attempt(job)

    def _ready(self, job: Job) -> bool:
        return job.kind in ("base", "warm") or (self._base(job) / "done").exists()

    def _is_dead(self, job: Job) -> bool:
        return (self._base(job) / "failed").exists()

    def _base(self, job: Job) -> Path:
        return self.work / f"base-{job.seed}"

    def _claim(self, job: Job) -> bool:
        try:
            os.close(os.open(self.work / f"claim-{job.key}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _attempt(self, job: Job) -> None:
        begin = time.time()
        run = {"base": self.base, "warm": self.warm, "tune": self.tune, "errors": self.errors}
        print(f"{time.strftime('%X')} {os.getpid()} {job.key}", flush=True)
        try:
            run[job.kind](job)
            took = (time.time() - begin) / job.length
            self.seconds[job.kind] = max(took, 0.7 * self.seconds.get(job.kind, 0.0))
            print(f"{time.strftime('%X')} {os.getpid()} {job.key}: {took:.1f} s", flush=True)
        except OutOfTimeError:
            print(f"{time.strftime('%X')} {os.getpid()} {job.key}: out of time", flush=True)
        except Exception as error:  # noqa: BLE001 - recorded, and the other jobs go on
            text = traceback.format_exc()
            print(text, flush=True)
            fault = {"error": f"{type(error).__name__}: {error}"[:500], "trace": text[-1500:]}
            append(self.out / "failures.csv", [asdict(job) | fault | where()])
            if job.kind == "base":
                (self._base(job) / "failed").touch()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # The kinds of jobs.

    def base(self, job: Job) -> None:
        """Train and save a base model."""
        begin = time.time()
        folder = self._base(job)
        folder.mkdir()
        torch.manual_seed(job.seed)
        model = train.new_model(self.scale, self.device)
        stop = min(begin + self.base_seconds, self.deadline)
        steps, losses = train.train_base(model, self.data, job.seed, stop)
        seconds = time.time() - begin
        held = {
            f"{name}_loss": train.token_losses(model, self.data, name).mean().item()
            for name in ("code", "text")
        }
        model.save_pretrained(folder)
        row = {
            "seed": job.seed, "weights": sum(p.numel() for p in model.parameters()),
            "steps": steps, "tokens": steps * self.scale.base_batch * self.scale.length,
            "seconds": round(seconds, 1), "corpus": self.corpus, **held,
            "losses": " ".join(map(str, losses)),
        }  # fmt: skip
        append(self.out / "base.csv", [row | where()])
        (folder / "done").touch()

    def warm(self, job: Job) -> None:
        """Compile what a later run needs, on a model that nobody has trained."""
        torch.manual_seed(0)
        model = codecs.pack(train.new_model(self.scale, self.device), job.codec)
        model = self._adapted(model, job)
        train.fine_tune(model, self.data, 0, 1e-4, 3, self.deadline)
        train.token_losses(model, self.data, "text")

    def errors(self, job: Job) -> None:
        """Measure the error of each codec by expert, beside the expert's use."""
        folder = self._base(job)
        for row in errors.by_expert(folder, self.data):
            append(self.out / "experts.csv", [{"seed": job.seed} | r | where() for r in row])
        self._save(f"rarity-{job.seed}", errors.rarity(folder, self.data))

    def tune(self, job: Job) -> None:
        """Fine-tune one base in one way, and record what that gave."""
        begin = time.time()
        model = codecs.load(self._base(job), job.codec, self.device)
        before = self._judge(model)
        torch.manual_seed(100 + job.seed)
        peft_model = self._adapted(model, job)
        trained, _ = peft_model.get_nb_trainable_parameters()
        rate, steps = self.scale.rate * job.rate, round(self.scale.steps * job.length)
        loading = time.time() - begin
        losses = train.fine_tune(peft_model, self.data, job.seed, rate, steps, self.deadline)
        training = time.time() - begin - loading
        after = self._judge(peft_model)
        if job.block == "codecs":
            for state, by_token in (("before", before), ("after", after)):
                self._save(f"tokens-{job.seed}-{job.codec}-{state}", by_token["text"])
        row: dict[str, Any] = asdict(job) | {"learning_rate": rate, "steps": steps}
        row |= {"trained": trained}
        for name in ("text", "code"):
            row[f"{name}_before"] = float(before[name].mean())
            row[f"{name}_after"] = float(after[name].mean())
        row |= {
            "loading_s": round(loading, 2), "training_s": round(training, 2),
            "losses": " ".join(map(str, losses)),
        }  # fmt: skip
        append(self.out / "runs.csv", [row | where()])

    def _judge(self, model: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {n: train.token_losses(model, self.data, n).numpy() for n in ("text", "code")}

    def _save(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Save an array for finish.py, which is there whole or not at all."""
        part = self.work / f"{name}.part.npy"
        np.save(part, values)
        part.replace(self.work / f"{name}.npy")

    def _adapted(self, model: Any, job: Job) -> Any:
        """Return the PEFT model of a job."""
        import peft

        config = self._config(job.rank, job.targets)
        if job.targets == "attention":
            return moe_qlora.get_peft_model(model, config, unpacked_ok=True)
        if job.codec == "bf16":
            config.target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            return peft.get_peft_model(model, config)
        if job.experts == "all":
            return moe_qlora.get_peft_model(model, config, experts=True)
        batches = self.data.batches("text", self.scale.batch, 5000 + job.seed)
        use = moe_qlora.expert_use(model, [next(batches) for _ in range(USE_BATCHES)])
        if job.experts == "by use":
            config = self._config(job.rank // 2, job.targets)
            peft_model = moe_qlora.get_peft_model(model, config, experts=True)
            more = self._config(2 * job.rank, "experts")
            hot = moe_qlora.hot_experts(use)
            peft_model.add_adapter("hot", moe_qlora.adapt_lora_config(model, more, experts=hot))
            peft_model.base_model.set_adapter(["default", "hot"])
            return peft_model
        which, _, percent = job.experts.partition("-")
        scores = use
        if which == "cold":
            scores = {name: -counts for name, counts in use.items()}
        elif which == "random":
            generator = torch.Generator().manual_seed(job.seed)
            scores = {n: torch.randperm(len(c), generator=generator) for n, c in use.items()}
        chosen = moe_qlora.hot_experts(scores, share=int(percent) / 100)
        return moe_qlora.get_peft_model(model, config, experts=chosen)

    def _config(self, rank: int, targets: str) -> Any:
        from peft import LoraConfig

        modules: list[str] = [] if targets == "experts" else ATTENTION
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--base-seconds", type=float, default=130.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to see that all runs")
    parser.add_argument("--jobs", type=int, help="the first so many alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.device == "cpu":
        torch.set_num_threads(1)
    Worker(options).loop(options.jobs)


if __name__ == "__main__":
    main()
