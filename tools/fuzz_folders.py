"""Mutate packed folders so that no checksum can tell, and see how verify, load and merge take it.

    python tools/fuzz_folders.py                     2,000 mutations, from a seed that is printed
    python tools/fuzz_folders.py --count 100 --seed 7 --kind nf4
    python tools/fuzz_folders.py --again nf4:7:31    one mutation once more, with its traceback

A tiny model is packed once for each kind, experts and Linear layers, with a LoRA adapter beside it.
Each mutation then changes one or two things in a copy of the folder: fields of bitsandbytes'
records, statistics, code tables, codes, plain tensors, the manifest, or config.json; checksums,
names, the manifest's id and config.json are made anew, so that only a check of meaning can see it.
Values that nothing contradicts, such as another scale, are left alone: they are another model.

Each step runs in a forked child, and ends in one of these:

    same      it gives bit for bit what the sound folder gives
    refused   it raises an exception of moe_qlora, whose message is one line
    foreign   transformers cannot read config.json, before moe_qlora is asked (loading only)
    changed   it goes on with other weights              (fails the run, as do the next two)
    raised    it raises something else
    crashed   the process ends by a signal, or says nothing for two minutes (hung)

Exit codes: 0 where nothing failed, 1 where something did; a line for each failure says how to run
it again. A mutation takes about half a second for its three steps together.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
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
from peft import LoraConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402

import moe_qlora  # noqa: E402
from moe_qlora.checkpoint.manifest import (  # noqa: E402
    CONFIG_KEY,
    FORMAT_VERSION,
    MANIFEST_NAME,
    SENTENCE,
    ShardEntry,
    TensorEntry,
    manifest_id,
    manifest_name,
    shard_entry,
    shard_names,
    tensor_entries,
)
from moe_qlora.checkpoint.verify import verify  # noqa: E402
from moe_qlora.errors import MoeQloraError  # noqa: E402
from moe_qlora.packing import codec, parametrize  # noqa: E402
from moe_qlora.packing.decoders import from_quant_state  # noqa: E402
from moe_qlora.testing import tiny_model  # noqa: E402
from tools.fuzz_shared import (  # noqa: E402
    FAILED,
    ODD,
    Say,
    digest,
    edit,
    ending,
    prepare_process,
    run_children,
)

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4-bf16": NF4 | {"bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
STEPS = ("verify", "load", "merge")

Folder = dict[str, Any]
"""A folder in memory: "tensors" by key, "manifest" without what follows from them, and "config"."""


# --- mutations ----------------------------------------------------------------------------------


def mutate(folder: Folder, rng: random.Random) -> str:
    """Change one place of a folder, or two; return what was done."""
    ways = [mutate_record, mutate_tensor, mutate_tensor, mutate_manifest, mutate_config]
    told = [rng.choice(ways)(folder, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    return "; ".join(told)


def mutate_record(folder: Folder, rng: random.Random) -> str:
    """Edit the JSON that bitsandbytes keeps beside 4-bit codes."""
    tensors = folder["tensors"]
    keys = sorted(key for key in tensors if ".quant_state.bitsandbytes__" in key)
    if not keys:
        return mutate_tensor(folder, rng)
    key = rng.choice(keys)
    try:
        record = json.loads(bytes(tensors[key].tolist()))
        shape = list(record["shape"])
    except (ValueError, TypeError, KeyError, RecursionError):  # two mutations met
        return mutate_tensor(folder, rng)
    field = rng.choice([*record, "absmax", "quant_map", "nested_quant_map", "x"])
    value: Any = "removed"
    if field in record and rng.random() < 0.2:
        del record[field]
    else:
        # Another finite offset, or a Linear layer's other dtype, contradicts nothing.
        odd = [v for v in ODD if not (field == "nested_offset" and type(v) is float and v < 1e300)]
        odd = [v for v in odd if not (field == "dtype" and v in ("float16", "bfloat16", "float32"))]
        value = record[field] = rng.choice(odd)
        if field == "shape" and rng.random() < 0.5:
            value = record[field] = neighbour(shape, rng)
    text = json.dumps(record).encode()
    if rng.random() < 0.1:
        text = rng.choice([text[:-1], b"", b"[]", b"[" * 5000, b"\xff" + text, text + text])
    tensors[key] = torch.tensor(list(text), dtype=torch.uint8)
    return f"record {key} {field} {value!r}"


def neighbour(shape: list[int], rng: random.Random) -> list[int]:
    """Return another shape, mostly of as many weights."""
    place = rng.randrange(len(shape))
    return rng.choice(
        [
            shape[::-1] if shape != shape[::-1] else [*shape, 1],
            [*shape[:place], shape[place] + 1, *shape[place + 1 :]],
            [*shape[:-2], shape[-2] * 2, shape[-1] // 2],
            [1, *shape],
            shape[1:],
        ]
    )


def mutate_tensor(folder: Folder, rng: random.Random) -> str:
    """Cut, stretch, cast, swap, spoil, lose or rename a tensor, mostly one of statistics."""
    tensors: dict[str, torch.Tensor] = folder["tensors"]
    ends = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", ".SCB", "_format")
    stats = sorted(key for key in tensors if key.endswith(ends))
    key = rng.choice(stats if rng.random() < 0.7 else sorted(tensors))
    tensor = tensors[key]
    flat = tensor.reshape(-1)
    ways = ["cut", "stretch", "cast", "view", "reshape", "swap", "lose", "rename", "empty", "copy"]
    scale = key.endswith(ends[:-1]) and tensor.is_floating_point()
    way = rng.choice([*ways, *(["spoil"] * 4 if scale else [])])
    if way == "cut":
        tensors[key] = flat[: rng.choice([1, len(flat) // 2, len(flat) - 1])].clone()
    elif way == "stretch":
        tensors[key] = torch.cat([flat, flat[: rng.choice([1, len(flat)])]])
    elif way == "cast":
        dtypes = [torch.int32, torch.uint8, torch.int8, torch.bool]  # a plain weight may be of
        dtypes += [torch.float16, torch.float64] if key in stats else []  # any of these
        tensors[key] = tensor.to(rng.choice([d for d in dtypes if d != tensor.dtype]))
    elif way == "view":
        dtypes = [torch.uint8, torch.int8, torch.int32, torch.int16]
        fits = [d for d in dtypes if flat.nbytes % d.itemsize == 0 and d != tensor.dtype]
        tensors[key] = flat.view(rng.choice(fits)) if flat.nbytes else flat.to(torch.float64)
    elif way == "reshape":
        tensors[key] = rng.choice([flat.view(1, -1), flat.view(-1, 1, 1), flat.view(-1, 1)])
    elif way == "swap":
        alike = [k for k in sorted(tensors) if tensors[k].shape != tensor.shape]
        other = rng.choice(alike)
        tensors[key], tensors[other] = tensors[other], tensor
        return f"swap {key} and {other}"
    elif way == "lose":
        del tensors[key]
    elif way == "rename":
        tensors[rng.choice([key + "_", "x." + key, key.replace("0", "9")])] = tensors.pop(key)
    elif way == "copy":
        tensors[f"{key}.{rng.choice(['absmax', 'quant_map', 'nested_absmax', 'SCB', 'x'])}"] = (
            tensor
        )
    elif way == "empty":
        tensors[key] = flat[:0].clone()
    else:
        spoiled = flat.clone()
        spoiled[rng.randrange(len(flat))] = rng.choice([float("nan"), float("inf"), -1.0])
        if key.endswith("quant_map"):
            spoiled = rng.choice([flat.flip(0), flat * 2, spoiled])
        tensors[key] = spoiled.view(tensor.shape)
    return f"{way} {key}"


def mutate_manifest(folder: Folder, rng: random.Random) -> str:
    """Edit how the manifest says that weights are packed, or which."""
    part = rng.choice(["codec", "codec", "experts", "experts", "model_type"])
    if part == "model_type":
        folder["manifest"][part] = rng.choice(["mixtral", "", "x", "qwen2_moe"])
        return "model_type"
    odd: tuple[Any, ...] = ODD
    if part == "experts" and folder["manifest"]["codec"].get("kind") == "int8":
        # Nothing else says what int8 codes decode to, so that another dtype is another model.
        odd = tuple(value for value in ODD if value not in ("float16", "bfloat16", "float32"))
    return f"manifest {part} {edit(folder['manifest'][part], rng, odd)}"


def mutate_config(folder: Folder, rng: random.Random) -> str:
    """Edit config.json and its copy in the manifest; what only changes a forward counts as same."""
    config = folder["config"]
    part = config["quantization_config"] if rng.random() < 0.3 else config
    return f"config {edit(part, rng)}"


# --- folders ------------------------------------------------------------------------------------


class Victim:
    """A sound packed folder with an adapter, and what each step gives for it."""

    def __init__(self, place: Path, kind: str) -> None:
        self.place, self.kind = place, kind
        model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
        model.save_pretrained(place / "plain")
        config = BitsAndBytesConfig(**KINDS[kind], llm_int8_skip_modules=["lm_head", "k_proj"])
        with moe_qlora.enabled():
            packed = type(model).from_pretrained(place / "plain", quantization_config=config)
        packed.save_pretrained(place / "sound")
        self.sound = self._read(place / "sound")
        peft_model = moe_qlora.get_peft_model(
            packed, LoraConfig(r=4, target_modules=["q_proj"]), experts=["down"]
        )
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        peft_model.save_pretrained(place / "adapter")
        write(place / "again", self.sound)  # as mutated folders are written
        self.right = {step: self.run(step, place / "again") for step in STEPS}

    def _read(self, folder: Path) -> Folder:
        name = next(f.name for f in folder.iterdir() if MANIFEST_NAME.fullmatch(f.name))
        manifest = json.loads((folder / name).read_text())
        tensors: dict[str, torch.Tensor] = {}
        for shard in manifest["shards"]:
            tensors |= load_file(folder / shard)
        return {"tensors": tensors, "config": manifest.pop("config"), "manifest": manifest}

    def mutated(self, seed: int, number: int) -> tuple[Folder, str]:
        """Return one mutation of the folder, always the same for the same numbers."""
        rng = random.Random(f"{self.kind} {seed} {number}")
        folder = copy.deepcopy(self.sound)
        return folder, mutate(folder, rng)

    def run(self, step: str, folder: Path) -> Any:
        """Run a step on a folder; return all that makes two results the same."""
        return {"verify": run_verify, "load": run_load, "merge": self._run_merge}[step](folder)

    def _run_merge(self, folder: Path) -> Any:
        with tempfile.TemporaryDirectory(dir=self.place) as out:
            merged = Path(out) / "merged"
            moe_qlora.merge_adapter(folder, self.place / "adapter", merged)
            files = sorted(merged.glob("*.safetensors"))
            return {k: digest(v) for file in files for k, v in load_file(file).items()}


def write(folder: Path, content: Folder) -> None:
    """Write a folder with checksums, names and id that fit what is in it."""
    folder.mkdir()
    manifest, config = dict(content["manifest"]), content["config"]
    tensors = {key: tensor.clone().contiguous() for key, tensor in content["tensors"].items()}
    first = folder / "model.safetensors"
    save_file(tensors, first, metadata={"format": "pt"})
    entries = tensor_entries([first])
    try:
        manifest["id"] = manifest_id(entries, manifest["codec"])
    except (TypeError, KeyError):
        manifest["id"] = "none"
    shard: ShardEntry = shard_entry(first)
    [name] = shard_names(manifest["id"], [shard])
    first.rename(folder / name)
    manifest["shards"] = {name: vars_of(shard)}
    manifest["tensors"] = {key: vars_of(entry) | {"file": name} for key, entry in entries.items()}
    # The order of the fields is that of the format.
    head = {"format_version": FORMAT_VERSION, "id": manifest.pop("id")}
    text = (json.dumps({**head, **manifest, "config": config}, indent=1) + "\n").encode()
    (folder / manifest_name(text)).write_bytes(text)
    mark = {"format_version": FORMAT_VERSION, "id": head["id"]}
    mark |= {"manifest": manifest_name(text), "entry": name}
    ours = {CONFIG_KEY: mark, "transformers_weights": SENTENCE}
    (folder / "config.json").write_text(json.dumps(config | ours, indent=2, sort_keys=True) + "\n")


def vars_of(entry: TensorEntry | ShardEntry) -> dict[str, Any]:
    """Return an entry's fields as JSON has them."""
    fields = {name: getattr(entry, name) for name in type(entry).__dataclass_fields__}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


# --- steps --------------------------------------------------------------------------------------


def run_verify(folder: Path) -> Any:
    """Verify; problems count as a refusal, the first of them as its message."""
    report = verify(folder)
    if report.problems:
        raise MoeQloraError(report.problems[0])
    return report.kind, report.experts, report.linears


def run_load(folder: Path) -> Any:
    """Load the folder, decode every packed weight, and return all of the model's tensors."""
    with moe_qlora.enabled():
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
    decoded = {}
    for name, module, leaf in parametrize.iter_packed(model):
        decoded[f"{name}.{leaf}"] = digest(codec.unpack(parametrize.read_packed(module, leaf)))
    for name, module in model.named_modules():
        state = getattr(module, "quant_state", None)
        if parametrize.is_packed_linear(module) and state is not None:
            weight = from_quant_state(module.weight.data, state)
            decoded[name] = digest(codec.unpack(weight))
    return {key: digest(tensor) for key, tensor in model.state_dict().items()}, decoded


def attempt(victim: Victim, step: str, folder: Path) -> tuple[str, str]:
    """Run a step; return how it ended, and a message."""
    end, message, result = ending(lambda: victim.run(step, folder), loads=step == "load")
    if end != "done":
        return end, message
    return ("same" if result == victim.right[step] else "changed"), ""


def batch(victim: Victim, seed: int, numbers: list[int], say: Say) -> None:
    """Run mutations in this process; write a line before and after each step."""
    for number in numbers:
        content, what = victim.mutated(seed, number)
        with tempfile.TemporaryDirectory(dir=victim.place) as place:
            folder = Path(place) / "model"
            write(folder, content)
            for step in STEPS:
                say(number, step, what)
                say(number, step, what, *attempt(victim, step, folder))


def fuzz(victim: Victim, seed: int, count: int, show: Callable[[str], None]) -> Counter[str]:
    """Run mutations of one kind; return how often each step ended how."""
    ends: Counter[str] = Counter()
    for number, step, what, end, message in run_children(
        lambda numbers, say: batch(victim, seed, numbers, say), list(range(count))
    ):
        ends[f"{step} {end}"] += 1
        if end in FAILED:
            show(f"{victim.kind}:{seed}:{number} {step} {end}: {what}: {message:.400}")
    return ends


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="mutations of all kinds together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one")
    parser.add_argument("--again", metavar="KIND:SEED:NUMBER", help="run one mutation here")
    args = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as place:
        if args.again:
            kind, seed, number = args.again.split(":")
            victim = Victim(Path(place) / "nf4" if kind == "nf4" else Path(place) / kind, kind)
            content, what = victim.mutated(int(seed), int(number))
            print(what)
            write(Path(place) / "model", content)
            for step in STEPS:
                try:
                    print(step, victim.run(step, Path(place) / "model") == victim.right[step])
                except Exception:  # noqa: BLE001 - shown, whatever it is
                    traceback.print_exc()
            return 0
        kinds = args.kind or list(KINDS)
        total: Counter[str] = Counter()
        print(f"seed {args.seed}: {args.count} mutations of {', '.join(kinds)}", flush=True)
        for index, kind in enumerate(kinds):
            share = args.count // len(kinds) + (index < args.count % len(kinds))
            total += fuzz(Victim(Path(place) / kind, kind), args.seed, share, print)
            print(f"{kind} done: {dict(sorted(total.items()))}", flush=True)
        failed = sum(n for end, n in total.items() if end.split()[1] in FAILED)
        print(f"{args.count} mutations, {sum(total.values())} steps, {failed} failed.")
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
