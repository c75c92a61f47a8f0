"""Mutate makers' folders, and hold what quantize, load and merge make of them against an oracle.

    python tools/fuzz_makers.py                      1,000 mutations, from a seed that is printed
    python tools/fuzz_makers.py --count 60 --seed 7 --kind "gpt_oss mxfp4"
    python tools/fuzz_makers.py --again "gpt_oss mxfp4:7:31"    one mutation once more

A tiny model of each family is written as its maker does: in bf16, expert by expert or fused, or
quantized. Each mutation changes one place of a copy, or two: shapes, dtypes, names, values, the
index, bytes of files, sizes in config.json, what is said of the quantization. The oracle
(fuzz_makers_oracle.py) decodes what the folder then describes, and stock transformers makes
parameters of it. Each step runs in a forked child, and ends in one of these:

    same      it gives bit for bit what the sound folder gives
    other     it gives the other model that the folder describes now, by the oracle
    warned    the same of a load, but tensors are missing, which transformers says and goes on
    refused   it raises an exception of moe_qlora, whose message is one line
    strict    the same, though the oracle could read the folder, and finds no NaN or inf in it
    foreign   transformers fails, before moe_qlora is asked (loading only)
    changed   it gives anything else                     (fails the run, as do the next three)
    raised    it raises something else
    crashed   the process ends by a signal
    hung      it says nothing for two minutes

Packed weights may be off by what their codec rounds; all that is plain is compared bit for bit.
Exit codes: 0 where nothing failed, 1 where something did. `--refusals` lists each strict refusal.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402

import moe_qlora  # noqa: E402
from moe_qlora.packing import parametrize  # noqa: E402
from moe_qlora.testing import tiny_model  # noqa: E402
from tests.helpers.prequantized import CASES, write_case, write_folder, write_shards  # noqa: E402
from tools import fuzz_makers_mutations as mutations  # noqa: E402
from tools import fuzz_makers_oracle as oracle  # noqa: E402
from tools.fuzz_makers_oracle import DamagedError, Tensors  # noqa: E402
from tools.fuzz_shared import (  # noqa: E402
    FAILED,
    Say,
    digest,
    ending,
    prepare_process,
    run_children,
)

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
STEPS = ("quantize", "load", "merge")

# Family, and whether experts are stored as their maker does (else fused, as the model has them).
PLAIN = {
    f"{family} bf16{'' if original else ' fused'}": (family, original)
    for family, original in [
        *(("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True), ("mixtral", False)),
        *(("gpt_oss", True), ("deepseek_v3", True), ("granitemoe", True), ("lfm2_moe", True)),
        *(("jetmoe", True), ("llama4_text", True)),
    ]
}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral fp8": ("mixtral", "fp8", {}),
    "mixtral fp8 channel": ("mixtral", "compressed-fp8", {"strategy": "channel"}),
    "mixtral int8": ("mixtral", "int8", {"group": 32}),
    "lfm2_moe fp8 tensor": (
        *("lfm2_moe", "fp8"),
        {"block": None, "modules_to_not_convert": ["conv"]},
    ),
}
KINDS = (*PLAIN, *CASES, *MADE)

Got = dict[str, tuple[Tensor, bool]]
"""Weights by name, and whether each was packed."""


def write_sound(path: Path, kind: str) -> None:
    """Write a sound folder of a kind, in three shards."""
    if kind in CASES:
        write_case(path, kind)
    elif kind in MADE:
        family, method, options = MADE[kind]
        write_folder(path, family, method, **options)
    else:
        family, original = PLAIN[kind]
        model: Any = tiny_model(family, dtype=torch.bfloat16)
        model.save_pretrained(path, save_original_format=original)
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        write_shards(path, tensors, 3)


class Victim:
    """A sound folder, an adapter for it, and what each step gives for it."""

    def __init__(self, place: Path, kind: str) -> None:
        self.place, self.kind = place, kind
        place.mkdir(parents=True)
        write_sound(place / "sound", kind)
        self.sound = mutations.read(place / "sound")
        mutations.write(place / "again", self.sound)
        self.plain = oracle.decode(oracle.read_folder(place / "again"), self.sound.config)
        self._write_adapter()
        self.optional = self._expected(place / "again")[2]
        self.right: dict[str, Any] = {}
        got = {step: self.run(step, place / "again") for step in STEPS}
        self.deltas = {
            key: tensor.double() - self.plain[key].double()
            for key, (tensor, _) in got["merge"].items()
            if digest(tensor) != digest(self.plain[key])
        }
        self.right = {step: digests(found) for step, found in got.items()}
        self.names = {step: found.keys() for step, found in got.items()}
        for step in STEPS:
            end, message = self.judge(step, got[step], self._expected(place / "again"))
            if end != "same" or not any(packed for _, packed in got["load"].values()):
                raise SystemExit(f"{kind}: the sound folder is not what the oracle says: {message}")

    def _write_adapter(self) -> None:
        """Write a random adapter of all experts and of what projects attention's output."""
        place = self.place / "twin"
        oracle.parameters(self.plain, self.sound.config, place)
        model: Any = AutoModelForCausalLM.from_pretrained(place)
        names = (param.name.split(".") for param in moe_qlora.detect(model).experts)
        experts = sorted({".".join(name[-2:]) for name in names})
        ends = ("o_proj", "o_b_proj", "out_proj")
        linears = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith(ends)
        }
        config = LoraConfig(
            r=2, target_modules=sorted(linears) or None, target_parameters=experts or None
        )
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
        adapted.save_pretrained(self.place / "adapter")

    def mutated(self, seed: int, number: int) -> tuple[mutations.Folder, str, str]:
        """Return a mutation of the folder, always the same for the same numbers, and its kind."""
        rng = random.Random(f"{self.kind} {seed} {number}")
        folder = copy.deepcopy(self.sound)
        kind, what = mutations.mutate(folder, rng)
        return folder, kind, what

    def _expected(self, folder: Path) -> tuple[Tensors, Tensors, set[str]]:
        """Return what a folder describes: 16-bit tensors, parameters, and what is missing."""
        config = json.loads((folder / "config.json").read_text())
        plain = oracle.decode(oracle.read_folder(folder), config)
        with tempfile.TemporaryDirectory(dir=self.place) as place:
            params, missing = oracle.parameters(plain, config, Path(place) / "twin")
        return plain, params, missing

    def expect(self, folder: Path) -> tuple[Tensors, Tensors, set[str]] | DamagedError:
        """Return what a folder describes, or why it describes nothing."""
        try:
            plain, params, missing = self._expected(folder)
        except DamagedError as error:
            return error
        return plain, params, missing - self.optional

    def run(self, step: str, folder: Path) -> Got:
        """Run a step; return all weights that it gives."""
        steps = {"quantize": self._quantize, "load": self._load, "merge": self._merge}
        with tempfile.TemporaryDirectory(dir=self.place) as out:
            return steps[step](folder, Path(out) / "out")

    def _quantize(self, folder: Path, out: Path) -> Got:
        moe_qlora.quantize_checkpoint(folder, out, NF4, device="cpu")
        return oracle.decoded_packed(out)

    def _load(self, folder: Path, out: Path) -> Got:
        config: Any = BitsAndBytesConfig(**NF4)
        with moe_qlora.enabled():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        got: Got = {}
        for name, module, leaf in parametrize.iter_packed(model):
            got[f"{name}.{leaf}"] = (getattr(module, leaf).detach(), True)
        for name, module in model.named_modules():
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if isinstance(module, nn.Linear) and state is not None:
                got[f"{name}.weight"] = (oracle.decode_4bit(module.weight.data, state), True)
        return {key: (tensor, False) for key, tensor in model.state_dict().items()} | got

    def _merge(self, folder: Path, out: Path) -> Got:
        moe_qlora.merge_adapter(folder, self.place / "adapter", out)
        merged: Tensors = {}
        for file in sorted(out.glob("*.safetensors")):
            merged |= load_file(file)
        return {key: (tensor, False) for key, tensor in merged.items()}

    def judge(self, step: str, got: Got, expected: Any) -> tuple[str, str]:
        """Return how a step that gave something ended, and what is wrong."""
        if isinstance(expected, DamagedError):
            return "changed", f"taken, although {expected}"
        plain, params, missing = expected
        wanted = plain if step == "merge" else params
        if missing and step == "quantize":
            return "changed", f"taken, although {sorted(missing)[0]} is missing"
        for name, tensor in wanted.items():
            if step != "merge" and name in missing:
                if name in got and got[name][1] and name not in self._loaded_plainly(params):
                    return "changed", f"{name} is missing, and random numbers were packed"
                continue
            if name not in got:
                if self.right and name in self.names[step]:
                    return "changed", f"{name} is not there"
                continue
            value, packed = got[name]
            if step == "merge" and name in getattr(self, "deltas", {}):
                wrong = self._merged_wrongly(name, tensor, value)
            else:
                wrong = oracle.difference(tensor, value, packed)
            if wrong:
                return "changed", f"{name} {wrong}"
        if not self.right or digests(got) == self.right[step]:
            return "same", ""
        return ("warned" if missing and step == "load" else "other"), ""

    @staticmethod
    def _loaded_plainly(params: Tensors) -> set[str]:
        """Return the names of Linear layers, whose missing weights transformers warns of."""
        return {name for name, tensor in params.items() if tensor.dim() == 2}

    def _merged_wrongly(self, name: str, tensor: Tensor, value: Tensor) -> str:
        delta = self.deltas[name]
        if not tensor.shape == value.shape == delta.shape:
            return f"is of the shape {tuple(value.shape)}, and the adapter of another"
        right = tensor.double() + delta
        room = 2.0**-7 * (right.abs() + delta.abs() + self.plain[name].double().abs()) + 1e-12
        wrong = ~((value.double() - right).abs() <= room)  # NaN among them
        return f"differs in {int(wrong.sum())} values" if bool(wrong.any()) else ""


def digests(got: Got) -> dict[str, Any]:
    """Return what tells results apart."""
    return {name: digest(tensor) for name, (tensor, _) in got.items()}


def attempt(victim: Victim, step: str, folder: Path, expected: Any) -> tuple[str, str]:
    """Run a step; return how it ended, and a message."""
    end, message, got = ending(lambda: victim.run(step, folder), loads=step == "load")
    if end == "done":
        return victim.judge(step, got, expected)
    if end == "refused" and not isinstance(expected, DamagedError) and not expected[2]:
        finite = all(bool(t.isfinite().all()) for t in expected[1].values())
        return ("strict" if finite else end), message  # NaN and inf cannot be packed
    return end, message


def batch(victim: Victim, seed: int, numbers: list[int], say: Say) -> None:
    """Run mutations in this process; write a line before and after each step."""
    for number in numbers:
        content, kind, what = victim.mutated(seed, number)
        with tempfile.TemporaryDirectory(dir=victim.place) as place:
            folder = Path(place) / "model"
            mutations.write(folder, content)
            say(number, "oracle", [kind, what])
            expected = victim.expect(folder)
            for step in STEPS:
                say(number, step, [kind, what])
                say(number, step, [kind, what], *attempt(victim, step, folder, expected))


Ends = Counter[tuple[str, str, str]]
"""How often steps ended: by kind of mutation, step, and end."""


def fuzz(
    victim: Victim, seed: int, count: int, show: Callable[[str], None], refusals: Counter[str]
) -> Ends:
    """Run mutations of one kind of folder; note strict refusals without names and numbers."""
    ends: Ends = Counter()
    for number, step, (kind, what), end, message in run_children(
        lambda numbers, say: batch(victim, seed, numbers, say), list(range(count))
    ):
        ends[kind, step, end] += 1
        if end in FAILED:
            show(f"{victim.kind}:{seed}:{number} {step} {end}: {what}: {message:.400}")
        if end == "strict":
            text = re.sub(r"/\S*/|[0-9]+", "#", message.replace(str(victim.place), ""))
            refusals[f"{kind}: {text:.160} <- {what:.90}"] += 1
    return ends


def table(title: str, rows: dict[str, Counter[str]]) -> str:
    """Return counts of ends as a table of text."""
    ends = ("same", "other", "warned", "refused", "strict", "foreign", *FAILED)
    lines = [f"{title:26}" + "".join(f"{end:>9}" for end in ends)]
    rows = {**rows, "all": sum(rows.values(), Counter())}
    lines += [f"{name:26}" + "".join(f"{row[e]:>9}" for e in ends) for name, row in rows.items()]
    return "\n".join(lines)


def again(place: Path, which: str) -> int:
    """Run one mutation here, with its traceback."""
    kind, seed, number = which.rsplit(":", 2)
    victim = Victim(place / "victim", kind)
    content, _, what = victim.mutated(int(seed), int(number))
    print(what)
    mutations.write(place / "model", content)
    expected = victim.expect(place / "model")
    print("oracle:", expected if isinstance(expected, DamagedError) else ("reads it", expected[2]))
    for step in STEPS:
        try:
            print(step, *victim.judge(step, victim.run(step, place / "model"), expected))
        except Exception:  # noqa: BLE001 - shown, whatever it is
            print(step)
            traceback.print_exc()
    return 0


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="mutations of all kinds together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one")
    parser.add_argument("--again", metavar="KIND:SEED:NUMBER", help="run one mutation here")
    parser.add_argument("--refusals", action="store_true", help="list strict refusals")
    args = parser.parse_args()
    prepare_process()
    kinds, refusals = args.kind or list(KINDS), Counter[str]()
    by_kind: dict[str, Counter[str]] = {}
    by_mutation = {kind: Counter[str]() for kind in mutations.KINDS}
    by_step = {step: Counter[str]() for step in STEPS}
    print(f"seed {args.seed}: {args.count} mutations of {', '.join(kinds)}", flush=True)
    for index, kind in enumerate(kinds):
        share = args.count // len(kinds) + (index < args.count % len(kinds))
        with tempfile.TemporaryDirectory() as place:
            if args.again:
                return again(Path(place), args.again)
            victim = Victim(Path(place) / "victim", kind)
            ends = fuzz(victim, args.seed, share, lambda line: print(line, flush=True), refusals)
        row = by_kind.setdefault(kind, Counter())
        for (mutation, step, end), count in ends.items():
            row[end] += count
            if mutation in by_mutation:
                by_mutation[mutation][end] += count
            if step in by_step:
                by_step[step][end] += count
        print(f"{kind} done: {dict(sorted(row.items()))}", flush=True)
    for line, count in sorted(refusals.items()) if args.refusals else ():
        print(f"{count:4} strict {line}")
    for title, rows in (("folder", by_kind), ("mutation", by_mutation), ("step", by_step)):
        print(f"\n{table(title, rows)}")
    failed = sum(row[end] for row in by_kind.values() for end in FAILED)
    print(f"\n{args.count} mutations, {sum(map(Counter.total, by_kind.values()))} steps, ", end="")
    print(f"{failed} failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
