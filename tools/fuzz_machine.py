"""The machine behind `fuzz_calls.py`: a sequence of calls as a program, and what may be refused."""

from __future__ import annotations

import importlib
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_qlora.errors import MoeQloraError
from moe_qlora.testing import tiny_inputs, tiny_model
from tools import fuzz_oracle
from tools.fuzz_oracle import Adapter, Contradiction, Oracle

FAMILIES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "llama4_text"),
    *("olmoe", "glm4_moe", "jetmoe", "deepseek_v2", "lfm2_moe", "hunyuan_v1_moe", "flex_olmo"),
    *("dots1", "minimax", "deepseek_v4", "nemotron_h", "qwen3_5_moe_text", "zaya"),
)
OUTSIDE_THE_INTERFACE = ("llama4_text", "jetmoe")  # their forwards read the weight itself
EXPERTS = 4  # of every tiny model: a weight with so many rows, and no bias, is a router
ROUTERS = {  # but in these, where the names of routers end so
    "deepseek_v4": ".gate.weight",
    "qwen3_5_moe_text": ".mlp.gate.weight",
    "zaya": ".router_mlp.out_proj.weight",
}
UNFIT = {"nemotron_h": "out_proj.weight"}  # Linear layers on which PEFT refuses LoRA

ALLOWED: dict[str, tuple[str, str, str]] = {
    # condition: the error, a part of its sentence, and why the call cannot be had
    "get_peft_model: DoRA on packed experts": (
        *("ConfigError", "use_dora=True does not work for LoRA on packed experts"),
        "DoRA needs the norm of each unpacked row",
    ),
    "get_peft_model: dropout where the forward reads the weight itself": (
        *("ConfigError", "lora_dropout=0.1 does not work for"),
        "such a forward reads W + s B A, in which dropout of the input has no place",
    ),
    "get_peft_model: a second time": (
        *("ConfigError", "is a PeftModel with adapters"),
        "adapters after the first come by add_adapter",
    ),
    "get_peft_model: LoRA on packed experts that are none": (
        *("ConfigError", "is for models with packed experts"),
        "after merge_and_unload the experts are plain",
    ),
    "add_adapter: on other parameters than another adapter": (
        *("ValueError", "all adapters must target the same set of parameters"),
        "PEFT nests a layer for each parameter, and the names in files follow from the nesting",
    ),
    "gradient_checkpointing: of JetMoe": (
        *("ValueError", "does not support activation checkpointing"),
        "transformers' class has none",
    ),
    "load_adapter: a name that is taken": (
        *("AdapterError", "which this model has already; give another"),
        "an adapter is not overwritten",
    ),
    "add_weighted_adapter: of chosen experts": (
        *("AdapterError", "needs LoRA on all experts"),
        "the sum's experts would be those of either",
    ),
    "add_weighted_adapter: the name of a layer": (
        *("AdapterError", "out of the files of other adapters"),
        "PEFT tells adapters' tensors by names, wherever they stand in a key",
    ),
    "add_weighted_adapter: linear, of two ranks": (
        *("ValueError", "All adapters must have the same r value"),
        "PEFT sums factors, which must be of one shape",
    ),
    "add_weighted_adapter: of an adapter that is not there": (
        *("AdapterError", "there is no adapter 'nobody'"),
        "there is nothing to sum",
    ),
    "merge_adapter: of experts in host memory": (
        *("ConfigError", "lies in host memory, by offload_experts, and cannot be replaced"),
        "the sum would be 16-bit experts on the device",
    ),
    "merge_and_unload: of experts in host memory": (
        *("ConfigError", "lies in host memory, by offload_experts, and cannot be replaced"),
        "the sum would be 16-bit experts on the device",
    ),
    "export_adapter: to a server that is not known": (
        *("ConfigError", "target is 'nobody'"),
        "its layout is not known",
    ),
}


def source(family: str, place: Path) -> Path:
    """Write a 16-bit folder of a family; return it."""
    folder = place / family
    if not folder.exists():
        model: Any = tiny_model(family, dtype=torch.bfloat16, initializer_range=0.1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 3 and len(weight) == EXPERTS:
                    weight.mul_(2)  # so that experts weigh as much as attention
                elif weight.dim() > 1 and float(weight.float().std()) < 0.05:
                    weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        model.save_pretrained(folder)
    return folder


def makers(place: Path) -> Path:
    """Write gpt-oss as its maker ships it, in MXFP4, beside the 16-bit folder; return it."""
    if not (place / "maker").exists():
        importlib.import_module("tests.helpers.mxfp4").write_gpt_oss(place)
    return place / "maker"


def fill(model: nn.Module, adapter: str, seed: int) -> None:
    """Give an adapter's factors values that are not zero; a chosen expert's alone, where chosen."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name and f".{adapter}." in name:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values * (0.1 if ".lora_A." in name else 0.3))


def forward(model: Any, inputs: dict[str, Tensor], exact: bool = True) -> Tensor:
    """Return logits; `exact` keeps bitsandbytes' Linear layers in fp32.

    Without a gradient and in evaluation they multiply in bf16, where the processor has that.
    """
    if not exact:
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out if out.requires_grad else out.requires_grad_()
    )
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        hook.remove()


def step(model: Any, inputs: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
    """Train a step of plain gradient descent; return the gradients by parameter name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fuzz_oracle.loss(forward(model, inputs)).backward()
    grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
    with torch.no_grad():
        for name, grad in grads.items():
            trained[name].sub_(lr * grad)
            trained[name].grad = None
    return grads


def load_of(folder: str, options: str = "") -> str:
    """Return the code that loads a folder in fp32."""
    return f"model = cls.from_pretrained({folder}, dtype=torch.float32{options})"


PRELUDE = """\
import copy
from pathlib import Path
from tempfile import mkdtemp

import torch
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.speed import offload
from moe_qlora.testing import model_class, tiny_inputs
from tests.helpers.delayed import Delayed
from tools.fuzz_machine import fill, forward, makers, source, step

# Of models with two layers the slot is to change hands; a copy that nobody waits for is garbage.
offload.SLOTS, offload.copier_of, off = 1, lambda device: Delayed(), None
"""


class Machine:
    """One sequence: the program so far, the names it has defined, and the oracle."""

    def __init__(self, seed: int, place: Path, sources: Path, family: str | None = None) -> None:
        self.rng, self.place, self.sources = random.Random(seed), place, sources
        self.family = family or FAMILIES[seed % len(FAMILIES)]
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"place": place, "sources": sources}
        exec(PRELUDE, self.names)  # noqa: S102 - a sequence is a program, and is shown as one
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.stage = "packed"  # then "peft", and "plain" after a merge into the model
        self.merged = self.pristine = self.hosted = False
        self.saved: list[tuple[str, Adapter]] = []  # adapters' folders, as expressions
        self.number = 0

    @property
    def model(self) -> Any:
        return self.names["model"]

    def program(self) -> str:
        """Return the sequence as a program."""
        head = 'place = Path(mkdtemp())\nsources = place / "sources"\n'
        return PRELUDE + head + "\n".join(self.lines) + "\n"

    def run(self, code: str, refusal: str | None = None) -> bool:
        """Run lines of the program; return whether they were not refused."""
        self.lines.append(code)
        try:
            exec(compile(code, "<sequence>", "exec"), self.names)  # noqa: S102
        except (MoeQloraError, ValueError) as error:
            if refusal is None or isinstance(error, Contradiction):
                raise
            kind, sentence, _ = ALLOWED[refusal]
            if type(error).__name__ != kind or sentence not in str(error) or "\n" in str(error):
                raise Contradiction(f"{refusal}: {type(error).__name__}: {error}") from error
            self.lines[-1] = "\n".join(["# refused:", *(f"# {x}" for x in code.split("\n"))])
            self.refused[refusal] += 1
            return False
        if refusal is not None:
            raise Contradiction(f"{refusal}: was not refused")
        return True

    def fresh(self, stem: str) -> str:
        """Return a name that was not given yet."""
        self.number += 1
        return f"{stem}{self.number}"

    def check(self, what: str, model: Any = None, wanted: Tensor | None = None) -> None:
        """Compare a model's logits with the oracle's, by default those of the active adapters."""
        model = self.model if model is None else model
        wanted = self.oracle.logits() if wanted is None else wanted
        fuzz_oracle.check_close(what, forward(model, self.oracle.inputs), wanted)

    # --- the start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Load or pack a model."""
        rng, family = self.rng, self.family
        ways = ["load", "load", "quantize_experts", "quantize_checkpoint"]
        way = rng.choice([*ways, *(["keep_codes"] * 4 if family == "gpt_oss" else [])])
        self.kind = rng.choice(["nf4", "nf4", "fp4", "int8"]) if way != "keep_codes" else "nf4"
        self.run(f'folder = source("{family}", sources)\ncls = model_class("{family}")')
        if way == "keep_codes":
            self.run("folder = makers(sources)")
        cls, folder = self.names["cls"], self.names["folder"]
        stock = folder.with_name("plain") if way == "keep_codes" else folder
        twin = cls.from_pretrained(stock, dtype=torch.float32, experts_implementation="eager")
        self.oracle = Oracle(twin, tiny_inputs(twin))
        self.describe(twin)
        self.run(f"config = {self.quantization(twin)}")
        codes, files = "keep_codes=True" * (way == "keep_codes"), way == "quantize_checkpoint"
        if way == "quantize_experts":
            make = "report = moe_qlora.quantize_experts(model, config)"
            self.begin_with("", make, before=load_of("folder") + "\n")
        elif files:
            self.run("moe_qlora.quantize_checkpoint(folder, place / 'packed', config)")
            self.run('assert verify(place / "packed", against=folder).good')
            self.begin_with("", load_of('place / "packed"'), files=True)
        else:
            self.begin_with(codes, load_of("folder", ", quantization_config=config"))
        self.begin_anew()
        self.run("inputs = tiny_inputs(model)")
        self.counts[way] += 1
        self.way, self.pristine = way, True
        self.read_base()
        self.check(way)

    def begin_with(self, options: str, make: str, before: str = "", files: bool = False) -> None:
        """Note how a model is made within `enabled`; draw whether its experts stay off the device.

        `files` are those of a packed folder, where they may stay.
        """
        places = ["", "", "", "offload=True", *(["offload='disk'"] * files)]
        place = self.rng.choice(places)
        given = ", ".join(filter(None, [options, place]))
        self.begin = f"{before}with moe_qlora.enabled({given}):\n    {make}"
        self.begins_hosted = bool(place)
        if place:
            self.begin += "\noff = moe_qlora.offload_experts(model)"

    def begin_anew(self) -> None:
        """Make the model as was noted."""
        self.run(self.begin)
        self.hosted = self.begins_hosted

    def quantization(self, twin: Any) -> str:
        """Return a quantization config; what bitsandbytes computes wrongly here stays in 16 bit."""
        rng = self.rng
        linears = [n for n, m in twin.named_modules() if type(m) is nn.Linear]
        all_plain = self.kind == "int8" or rng.random() < 0.25
        narrow = [n for n in linears if twin.get_submodule(n).in_features % 64]
        skip = linears if all_plain else ["lm_head", *narrow]
        said = {
            "int8": "load_in_8bit=True",
            "nf4": "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant="
            f"{rng.random() < 0.6}",
            "fp4": "load_in_4bit=True, bnb_4bit_quant_type='fp4'",
        }[self.kind]
        if self.kind != "int8":
            said += ", bnb_4bit_compute_dtype=torch.float32"
        return f"BitsAndBytesConfig({said}, llm_int8_skip_modules={skip})"

    def describe(self, twin: Any) -> None:
        """Note which weights of the plain model are experts', routers' and Linear layers'."""
        shapes = {n: p.shape for n, p in twin.named_parameters() if not n.endswith("bias")}
        self.experts = [n for n, s in shapes.items() if len(s) == 3 and s[0] == EXPERTS]
        self.routers = [n for n, s in shapes.items() if len(s) == 2 and s[0] == EXPERTS]
        if self.family in ROUTERS:
            self.routers = [n for n in shapes if n.endswith(ROUTERS[self.family])]
        head = twin.get_output_embeddings()
        self.linears = [
            f"{n}.weight" for n, m in twin.named_modules() if type(m) is nn.Linear and m is not head
        ]
        if self.family in UNFIT:
            self.linears = [n for n in self.linears if not n.endswith(UNFIT[self.family])]

    def parameters(self, names: Iterable[str]) -> set[str]:
        """Return those of the weights that PEFT adapts as parameters: of no Linear layer."""
        return {name for name in names if name not in self.linears}

    def read_base(self) -> None:
        """Decode the model's weights, and check that all experts are packed."""
        kept = self.experts if self.way == "keep_codes" else ()
        packed = self.oracle.read_base(self.model, self.kind, kept)
        if not packed.issuperset(self.experts):
            raise Contradiction(f"not packed: {sorted(set(self.experts) - packed)}")

    def sequence(self) -> None:
        """Start, and make 8 to 18 calls."""
        self.start()
        left = self.rng.randint(7, 17)
        while left:
            name = self.rng.choice(list(CALLS))
            if name in RARER and self.rng.random() < 0.6:
                continue
            stages, make = CALLS[name]
            if self.stage not in stages or (self.merged and name not in WHILE_MERGED):
                continue
            if make(self) is not False:
                self.counts[name] += 1
                left -= 1
                self.check(f"after {name}")
                there = getattr(self.model, "peft_config", {})
                if set(there) != set(self.oracle.adapters):
                    raise Contradiction(f"after {name} adapters are {list(there)}")


class Tally:
    """What the sequences have shown so far."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.families: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: list[int] = []

    def run(self, seed: int, sources: Path, show: Callable[[str], None]) -> str:
        """Run one sequence; return its program, and show what it contradicts."""
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as place:
            machine = Machine(seed, Path(place), sources)
            try:
                machine.sequence()
            except Exception as error:  # noqa: BLE001 - shown, whatever it is
                self.failed.append(seed)
                trace = "" if isinstance(error, Contradiction) else traceback.format_exc()
                what = f"{type(error).__name__}: {error}\n{trace}"
                show(f"seed {seed}, {machine.family}: {what}\n{machine.program()}")
        self.calls += machine.counts
        self.refused += machine.refused
        self.families[machine.family] += 1
        return machine.program()

    def __str__(self) -> str:
        parts = (("families", self.families), ("calls", self.calls), ("refused", self.refused))
        lines = [
            f"{title}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            for title, counts in parts
        ]
        total = self.families.total()
        return "\n".join([*lines, f"{total} sequences, {len(self.failed)} failed: {self.failed}"])


Call = Callable[[Machine], Any]
CALLS: dict[str, tuple[tuple[str, ...], Call]] = {}
"""The stages in which a call can be made, and what makes it; it returns False where it did not."""
RARER = ("deepcopy", "train_mode", "evaluate", "quantize_again", "save_packed", "save_plain")
WHILE_MERGED = ("unmerge_adapter", "train_mode", "deepcopy", "save_adapter", "set_adapter")


def call(*stages: str) -> Callable[[Call], Call]:
    """Register a call for stages of a model."""

    def register(make: Call) -> Call:
        CALLS[make.__name__] = (stages, make)
        return make

    return register
