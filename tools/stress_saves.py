"""Save one model into one folder from several processes at once, kill some, and look what is there.

    python tools/stress_saves.py                                # 2 and 4 processes, 250 rounds each
    python tools/stress_saves.py --processes 4 --rounds 100 --kill 0.5 --seed 7
    python tools/stress_saves.py --commands merge export-vllm report   # or all, without names

Each round starts with a folder that is absent, empty, or holds a packed model, or a 16-bit one, and
files of others.
All processes save into it at the same time, each one of three models with one layer of experts.
Each is killed with the probability `--kill`, at a random moment, and meets a full disk with the
probability `--full`, at a random change of the disk. Then the folder must verify as the old model
or as one that was saved, byte for byte, and the others' files must be there. Every tenth round ends
with an undisturbed save, after which nothing may be left of those that were killed.

With `--commands`, each round runs one command of `moe-qlora` and harms it: its files may not grow
over a size, its disk is a small one (as root, where file systems may be mounted), a change of the
disk is refused, or it is killed at a change or at a random moment. Then the target is new, byte for
byte, or as it was; the message is one sentence; what was read is as it was; the command run again
succeeds, and leaves nothing beside its target.

Exit code 0: no round failed. Rounds that failed are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import BitsAndBytesConfig

from moe_qlora import MoeQloraError, export_adapter, get_peft_model, quantize_experts
from moe_qlora.checkpoint.integrity import check_folder
from moe_qlora.cli.app import run
from moe_qlora.testing import tiny_model

MODELS = 3
REFUSED = 3
FOREIGN = {"tokenizer.json": b"{}", "notes.txt": b"kept"}
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
STARTS = ("absent", "empty", "holds a model", "holds a 16-bit model")


def refuse() -> None:
    """Say what a full disk says."""
    raise OSError(errno.ENOSPC, "No space left on device")


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(folder: Path, change: int, act: Callable[[], None] = refuse) -> None:
    """Refuse a change below a folder, or `act` then: the first, the second, ..."""
    left = change

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(folder) in str(args[0]):
            left -= 1
            if left == 0:
                act()

    sys.addaudithook(hook)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by name."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in found}


class Stress:
    """The models, what an undisturbed save of each writes, and what the rounds have shown."""

    def __init__(self, root: Path, seed: int) -> None:
        self.target, self.random = root / "target" / "model", random.Random(seed)
        self.models: list[Any] = []
        self.whole: list[dict[str, bytes]] = []
        for number in range(MODELS):
            model: Any = tiny_model("qwen3_moe", seed=number, num_hidden_layers=1)
            quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
            self.models.append(model)
            begin = time.monotonic()
            self.save(number, root / str(number))
            self.seconds = time.monotonic() - begin
            self.whole.append(files(root / str(number)))
        plain: Any = tiny_model("qwen3_moe", seed=MODELS, num_hidden_layers=1)
        plain.save_pretrained(root / "plain", max_shard_size="60KB")
        self.plain = files(root / "plain")
        self.seen: Counter[str] = Counter()

    def save(self, number: int, folder: Path) -> None:
        """Save a model, in shards of a size of its own."""
        self.models[number].save_pretrained(folder, max_shard_size=f"{40 + 10 * number}KB")

    def start(self, kind: str) -> dict[str, bytes]:
        """Make the folder as a round finds it; return what is in it."""
        shutil.rmtree(self.target.parent, ignore_errors=True)
        self.target.parent.mkdir()
        models = {"holds a model": self.whole[0], "holds a 16-bit model": self.plain}
        content = models[kind] | FOREIGN if kind in models else {}
        if kind != "absent":
            self.target.mkdir()
        for name, raw in content.items():
            (self.target / name).write_bytes(raw)
        return content

    def fork(self, number: int, begin: float, full: int) -> int:
        """Save a model in a process of its own, from a moment on; return its id.

        The disk is full at the change `full`, or never (0).
        """
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            warnings.simplefilter("ignore")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for bar in (tqdm, *tqdm.__subclasses__()):
                bar.set_lock(threading.RLock())  # a killed process would keep the common one
            if full:
                fill_disk(self.target.parent, full)
            time.sleep(max(begin - time.monotonic(), 0))
            self.save(number, self.target)
            status = 0
        except MoeQloraError:
            status = REFUSED
        finally:
            os._exit(status)

    def round(self, kind: str, processes: int, kill: float, full: float, mop: bool) -> list[str]:
        """Run one round; return what is wrong with its outcome."""
        before = self.start(kind)
        begin = time.monotonic() + 0.02
        models = [self.random.randrange(MODELS) for _ in range(processes)]
        chance = self.random.random
        refusals = [self.random.randint(1, 40) * (chance() < full) for _ in models]
        children = [
            self.fork(number, begin, change)
            for number, change in zip(models, refusals, strict=True)
        ]
        deadly = [child for child in children if chance() < kill]
        span = self.seconds * (processes + 1)
        moments = sorted((begin + self.random.uniform(0, span), child) for child in deadly)
        for moment, child in moments:
            time.sleep(max(moment - time.monotonic(), 0))
            os.kill(child, signal.SIGKILL)  # one that has ended is still to be waited for
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        names = {0: "saved", REFUSED: "refused", -signal.SIGKILL: "killed"}
        self.seen.update(names.get(end, "crashed") for end in ends)
        faults = [
            f"a process ended with {end}"
            for end, refusal in zip(ends, refusals, strict=True)
            if end not in (0, -signal.SIGKILL, REFUSED if refusal else 0)
        ]
        # one that is refused may have been refused after it was done
        faults += self.judge(before, models, any(end == 0 for end in ends))
        if mop:
            self.save(0, self.target)
            kept = FOREIGN if before else {}
            found = files(self.target)
            if any(end != 0 for end in ends):  # one that was killed as it moved them out
                weights = self.plain.keys() - self.whole[0].keys()
                found = {name: raw for name, raw in found.items() if name not in weights}
            if found != self.whole[0] | kept:
                faults.append("an undisturbed save does not leave the model and nothing else")
            if list(self.target.parent.glob(".*.partial")):
                faults.append("an undisturbed save leaves a staging folder beside the model")
        return faults

    def judge(self, before: dict[str, bytes], maybe: list[int], saved: bool) -> list[str]:
        """Say what is wrong with the folder, in which one of `maybe` may have been saved."""
        if not (self.target / "config.json").exists():
            self.seen["nothing there"] += 1
            return ["the model is lost"] if before or saved else []
        found = files(self.target)
        old = {name: raw for name, raw in before.items() if name not in FOREIGN}
        if not saved and found["config.json"] == self.plain["config.json"]:
            kept = found.keys() >= old.keys() and all(found[name] == old[name] for name in old)
            self.seen["old"] += kept
            return [] if kept else ["the 16-bit model is lost"]
        try:
            manifest = check_folder(self.target)
        except MoeQloraError as error:
            return [f"the folder is damaged: {error}"]
        fits = [] if saved or not before else [("old", old)]
        fits += [("new", self.whole[number]) for number in maybe]
        for state, whole in fits:
            if found.keys() >= whole.keys() and all(found[name] == whole[name] for name in whole):
                self.seen[state] += 1
                lost = [name for name in FOREIGN if before and found.get(name) != FOREIGN[name]]
                return [f"{name} is lost" for name in lost]
        return [f"the folder holds {manifest.id[:8]}, which is neither the old model nor a new one"]


COMMANDS = {
    "merge": "merge model adapter {} --quiet",
    "merge-packed": "merge packed adapter {} --quiet --max-shard-size 50KB",
    "merge-like-training": "merge model adapter {} --like-training --dtype float32 --quiet",
    "export-vllm": "export adapter --base model --for vllm -o {}",
    "export-sglang": "export adapter --base packed --for sglang -o {}",
    "export-gguf": "export adapter --base model --for gguf -o {}",
    "export-peft": "export single --base model --for peft -o {}",  # rewritten in a temporary folder
    "quantize": "quantize model {} --quiet --max-shard-size 30KB",
    "report": "report adapter --base model -o {}/page.html --seq 16 --quiet",
}
HARMS = ("small files", "small disk", "refused", "killed at a change", "killed")
_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d")  # of a report's page


class Commands:
    """What commands read, what they write undisturbed, and what the rounds have shown."""

    def __init__(self, root: Path, seed: int, commands: Sequence[str]) -> None:
        self.root, self.random, self.commands = root, random.Random(seed), commands
        self.place, self.target = root / "place", root / "place/out"
        for name in ("model", "packed"):
            model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
            if name == "packed":
                quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
            model.save_pretrained(root / name, max_shard_size="60KB")
        model.config._name_or_path = str(root / "packed")
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        get_peft_model(model, lora, experts=True).save_pretrained(root / "adapter")
        export_adapter(root / "adapter", root / "single", base=root / "model", target="vllm")
        self.read = self._read()
        self.whole: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        for command in commands:
            self._clear()
            begin = time.monotonic()
            if self._ended(self._fork(command, "", 0)) != 0:
                raise SystemExit(f"{command} fails undisturbed: {self.said()}")
            self.seconds[command] = time.monotonic() - begin
            self.whole[command] = self._found()
        self.mounts = os.geteuid() == 0 and self._mount(1) and not self._unmount()
        self.seen: Counter[str] = Counter()

    def _read(self) -> dict[str, dict[str, bytes]]:
        return {name: files(self.root / name) for name in ("model", "packed", "adapter", "single")}

    def _found(self) -> dict[str, bytes]:
        return {name: _TIME.sub(b"", raw) for name, raw in files(self.target).items()}

    def said(self) -> str:
        """Return what the last command wrote to stderr."""
        return (self.root / "stderr").read_text(encoding="utf-8")

    def _clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.target.mkdir(parents=True)

    def _mount(self, pages: int) -> bool:
        call = ["mount", "-t", "tmpfs", "-o", f"size={4 * pages}k", "tmpfs", str(self.place)]
        done = subprocess.run(call, capture_output=True, check=False).returncode == 0
        if done:
            self.target.mkdir()
        return done

    def _unmount(self) -> int:
        return subprocess.run(["umount", str(self.place)], check=False).returncode

    def _fork(self, command: str, harm: str, size: int) -> int:
        """Run a command in a process of its own; return its id."""
        child = os.fork()
        if child:
            return child
        try:
            os.chdir(self.root)
            for number, name in ((1, "stdout"), (2, "stderr")):
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            if harm == "small files":
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            elif harm in ("refused", "killed at a change"):
                fill_disk(self.place, size, refuse if harm == "refused" else die)
            words = COMMANDS[command].format(self.target).split()
            sys.argv = ["moe-qlora", *words]
            run()
        except SystemExit as stop:
            sys.stderr.flush()
            os._exit(int(stop.code or 0))
        finally:
            os._exit(1)

    @staticmethod
    def _ended(child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def round(self, command: str, harm: str) -> list[str]:
        """Run a command and harm it; return what is wrong with its outcome."""
        self._clear()
        sizes = [len(raw) for raw in self.whole[command].values()]
        largest = {"small files": max(sizes), "small disk": sum(sizes) // 4096 + 2}.get(harm, 40)
        size = self.random.randint(1, largest)
        if harm == "small disk" and not self._mount(size):
            return []
        old = files(self.target)
        child = self._fork(command, harm, size)
        if harm == "killed":
            time.sleep(self.random.uniform(0, self.seconds[command]))
            os.kill(child, signal.SIGKILL)
        end, found, said = self._ended(child), self._found(), self.said()
        states = {0: "done", 2: "refused", -signal.SIGKILL: "killed"}
        self.seen[f"{command}, {harm}: {states.get(end, 'crashed')}"] += 1
        new = found == self.whole[command]
        faults = []
        if end not in states or (end == 0 and not new):
            faults.append(f"it ends with {end}: {said[-200:]}")
        if not new and found != old:
            faults.append(f"the target holds {sorted(found)}")
        one = said.startswith("error: ") and said.count("\n") == 1 and "cannot be written" in said
        if end == 2 and not one:
            faults.append(f"it says {said!r}")
        if harm == "small disk":
            call = ["mount", "-o", "remount,size=64m", str(self.place)]
            subprocess.run(call, check=True)
        if not new:
            if self._ended(self._fork(command, "", 0)) != 0 or self._found() != self.whole[command]:
                faults.append(f"the next run fails: {self.said()}")
            left = [path.name for path in self.place.iterdir() if path != self.target]
            faults += [f"the next run leaves {left}"] if left else []
        if harm == "small disk":
            self._unmount()
        return faults + ["what was read has changed"] * (self._read() != self.read)

    def run(self, rounds: int) -> int:
        """Run so many rounds of each command and harm; return how many failed."""
        failed = 0
        for command in self.commands:
            for harm in HARMS:
                if harm == "small disk" and not self.mounts:
                    continue
                for _ in range(rounds):
                    faults = self.round(command, harm)
                    failed += bool(faults)
                    for fault in faults:
                        print(f"{command}, {harm}: {fault}")
        for line, count in sorted(self.seen.items()):
            print(f"{count:5} {line}")
        return failed


def main() -> int:
    """Run the rounds, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, help="run these, not saves")
    rounds = "for each number of processes, or command and harm (default: 250, or 20)"
    parser.add_argument("--rounds", type=int, default=0, help=rounds)
    parser.add_argument("--kill", type=float, default=0.35, help="probability, for each process")
    parser.add_argument("--full", type=float, default=0.15, help="probability, for each process")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no others
    failed = 0
    if options.commands is not None:
        with tempfile.TemporaryDirectory() as root:
            commands = Commands(Path(root), options.seed, options.commands or list(COMMANDS))
            failed = commands.run(options.rounds or 20)
        print(f"{failed} rounds failed")
        return int(failed > 0)
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as root:
            stress = Stress(Path(root), options.seed)
            begin = time.monotonic()
            for number in range(options.rounds or 250):
                kind = STARTS[number % len(STARTS)]
                faults = stress.round(kind, processes, options.kill, options.full, number % 10 == 9)
                failed += bool(faults)
                for fault in faults:
                    print(f"round {number}, {processes} processes, folder {kind}: {fault}")
            counts = ", ".join(f"{count} {name}" for name, count in sorted(stress.seen.items()))
            seconds = time.monotonic() - begin
        print(f"{processes} processes, {options.rounds or 250} rounds in {seconds:.0f} s: {counts}")
    print(f"{failed} rounds failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
