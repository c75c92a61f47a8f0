"""The entries of the corpus: model types x codecs, a table of refusals, and those of a GPU.

Weights, factors of LoRA and the tensors that gradients are multiplied with lie on a grid of powers
of two and are drawn by name from integers, so that packed bytes are the same on every machine and
what passes through a matrix product differs by rounding alone.
"""

import hashlib
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.backends.utils import _get_4bit_code
from peft import IA3Config, LoraConfig, PeftModel, VeraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

import moe_qlora
from moe_qlora.cli import main
from moe_qlora.testing import tiny_inputs, tiny_model

TYPES = (
    "dbrx", "deepseek_v3", "deepseek_v4", "diffusion_gemma", "ernie4_5_moe", "gemma4", "glm4_moe",
    "gpt_oss", "granitemoehybrid", "jetmoe", "llama4_text", "longcat_flash", "minimax", "mixtral",
    "nemotron_h", "olmoe", "phimoe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_vl_moe", "step3p5",
    "zaya",
)  # fmt: skip
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CODECS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "double": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "mxfp4": NF4,  # of Linear layers alone
}
EVERY_CODEC = ("gpt_oss", "llama4_text", "mixtral", "qwen3_moe")
# Routers that read the weight of a Linear layer, which bitsandbytes packs unless it is told not to.
SKIPPED = {"longcat_flash": ["lm_head", "classifier"]}
PLANNED = ("jetmoe", "llama4_text", "olmoe", "qwen3_moe")  # a rehearsal takes 1 to 30 s
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # whole blocks of 32, as MXFP4 needs


# Those that take longest come first
ENTRIES = ["gpt_oss/mxfp4", "refusals/calls"]
ENTRIES += [f"{kind}/nf4" for kind in sorted(TYPES, key=lambda kind: kind not in PLANNED)]
for _number, _kind in enumerate(TYPES):
    _others = ["double", "fp4", "int8"]
    _chosen = _others if _kind in EVERY_CODEC else [_others[_number % 3]]
    ENTRIES += [f"{_kind}/{_codec}" for _codec in _chosen]

GPU_ENTRIES = (
    *("qwen3_moe/nf4/eager", "qwen3_moe/nf4/recorded", "qwen3_moe/double/recorded"),
    *("gpt_oss/nf4/recorded", "gpt_oss/mxfp4/recorded", "mixtral/fp4/recorded"),
    *("olmoe/int8/recorded", "deepseek_v3/nf4/recorded", "llama4_text/nf4/recorded"),
    *("qwen3_moe/nf4/compiled", "qwen3_moe/nf4/offloaded", "gpt_oss/mxfp4/offloaded recorded"),
    *("qwen3_moe/nf4/part", "glm4_moe/double/part"),
)
BATCH, SEQ, STEPS = 4, 32, 3
KEPT_SEQ = 1024  # Of layers kept in part: activations that are more than CUDA's own memory varies


def quantization(
    codec: str, dtype: torch.dtype = torch.float32, kind: str = ""
) -> BitsAndBytesConfig:
    settings = CODECS[codec] | {"llm_int8_skip_modules": SKIPPED.get(kind)}
    if "load_in_4bit" in settings:
        settings["bnb_4bit_compute_dtype"] = dtype
    return BitsAndBytesConfig(**settings)


def generic_kernel() -> Any:
    """Let bitsandbytes' generic code decode Linear layers, while what this returns is alive.

    Its AVX-512 kernel (0.50.2) is wrong where a row is no whole number of blocks.
    """

    def decode(codes: Tensor, absmax: Tensor, size: int, kind: str, *form: Any) -> Tensor:
        code, flat = _get_4bit_code(kind, codes.device), codes.reshape(-1).view(torch.uint8)
        return _dequantize_4bit_compute(flat, absmax.float(), code, size, *form)

    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", decode, "CPU", allow_override=True)
    return library


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return torch.Generator().manual_seed(seed)


def grid(name: str, shape: Iterable[int], bits: int = 13) -> Tensor:
    """Return float32 numbers of a standard deviation near 836 / 2**bits, drawn by name, exact."""
    shape, generator = tuple(shape), _generator(name)
    one, two = (torch.randint(-1024, 1025, shape, generator=generator) for _ in range(2))
    return (one + two).float() / 2**bits


@torch.no_grad()
def put_on_grid(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dim() > 1:
            weight.copy_(grid(name, weight.shape))
        elif weight.is_floating_point():
            weight.copy_(weight.bfloat16())  # logarithms in 1-D ones differ in their last bits
    for value in model.state_dict(keep_vars=True).values():
        if value.is_floating_point() and not isinstance(value, nn.Parameter):
            value.copy_(value.bfloat16())  # decays, by exponentials


@torch.no_grad()
def fill_adapter(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            values = grid(name, weight.shape, bits=13 if "lora_A" in name else 15)
            weight.copy_(values)


def sha(value: Any) -> str:
    """Return 16 digits of the SHA-256 of a tensor with dtype and shape, or of an object as JSON."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten()
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        raw = head + content.view(torch.uint8).numpy().tobytes() if content.numel() else head
    else:
        raw = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()[:16]


def rounded(value: Tensor) -> float:
    return float(f"{float(value):.6g}")


def fingerprint(name: str, value: Tensor | None) -> Any:
    """Return a tensor's norm and its product with signs that are drawn by its name."""
    if value is None:
        return "none"
    flat = value.detach().cpu().double().flatten()
    signs = torch.randint(0, 2, flat.shape, generator=_generator(name)).double() * 2 - 1
    return [rounded(flat.norm()), rounded(flat @ signs)]


def fingerprints(tensors: Mapping[str, Any], source: Mapping[str, Tensor] = {}) -> dict[str, Any]:
    """Return fingerprints of tensors, and hashes of those that are the source's own."""
    found: dict[str, Any] = {}
    for name, value in sorted(tensors.items()):
        own = source.get(name)
        same = own is not None and own.dtype == value.dtype and torch.equal(own, value)
        found[name] = sha(value) if same else fingerprint(name, value)
    return found


def state_hashes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a hash for each weight, over all tensors of its packed form, and one of the keys.

    Floats that are not on the grid (maps of codes, offsets, decays) differ in their last bits with
    the processor: of these there is a fingerprint.
    """
    groups: dict[str, dict[str, str]] = {}
    loose: dict[str, list[Tensor]] = {}
    for key, value in tensors.items():
        weight = re.split(r"\.(?:absmax|quant_map|nested_|quant_state|SCB|weight_format)", key)[0]
        weight = weight.removesuffix(".original")
        scaled = value.double() * 2**15
        exact = not value.is_floating_point() or torch.equal(scaled, scaled.round())
        said = sha(value) if exact else f"{value.dtype} {tuple(value.shape)}"
        groups.setdefault(weight, {})[key] = said
        if not exact:
            loose.setdefault(f"{weight} (floats)", []).append(value.double().flatten())
    hashes = {weight: sha(pieces) for weight, pieces in sorted(groups.items())}
    rest = fingerprints({weight: torch.cat(pieces) for weight, pieces in loose.items()})
    return {"keys": f"{len(tensors)} {sha(sorted(tensors))}", **hashes, **rest}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def quietly() -> None:
    """Keep logs, warnings and progress bars off the terminal."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()


def write_base(model_type: str, folder: Path, codec: str = "", **overrides: Any) -> Any:
    """Write a 16-bit folder (float32 here), or of MXFP4; return the class that loads it."""
    model: Any = tiny_model(model_type, **overrides | (WIDE if codec == "mxfp4" else {}))
    put_on_grid(model)
    model.save_pretrained(folder)
    if codec == "mxfp4":
        publish_mxfp4(folder)
    return type(model)


def publish_mxfp4(folder: Path) -> None:
    """Turn a folder of gpt-oss into one as its maker publishes it, with random blocks."""
    tensors = read_tensors(folder)
    experts = ("experts.gate_up_proj", "experts.down_proj")
    for key in [key for key in tensors if key.endswith(experts)]:
        count, inner, out = tensors.pop(key).shape
        shape = (count, out, inner // 32)
        draw, lots = torch.randint, _generator(key)
        tensors[f"{key}_blocks"] = draw(256, (*shape, 16), generator=lots, dtype=torch.uint8)
        tensors[f"{key}_scales"] = draw(120, 124, shape, generator=lots, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def lora(model: nn.Module, **settings: Any) -> LoraConfig:
    """Return LoRA on every Linear layer and on all experts."""
    chosen = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"} | settings
    return LoraConfig(target_parameters=moe_qlora.target_parameters(model), **chosen)


def settle(model: Any) -> Any:
    """Put a model in evaluation mode, but for layers that bitsandbytes packs for a CPU's own units.

    It does so for inference on some processors alone.
    """
    model.eval()
    for module in model.modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            module.train()
    return model


@torch.no_grad()
def output(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the logits, or the last hidden states of a model that has none."""
    torch.manual_seed(0)  # some models draw what they begin with
    return _logits(model(**inputs, use_cache=False))


def _logits(found: Any) -> Tensor:
    return found.logits if getattr(found, "logits", None) is not None else found[0]


def step(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the loss, the model's own if it has one."""
    labels = {"labels": inputs["input_ids"]} if "input_ids" in inputs else {}
    torch.manual_seed(0)
    try:
        found = model(**inputs, **labels, use_cache=False)
    except TypeError:
        found = model(**inputs, use_cache=False)
    logits, loss = _logits(found), getattr(found, "loss", None)
    if loss is None:
        loss = (logits * grid("loss", logits.shape, bits=10).to(logits)).mean()
    loss.backward()
    return logits, loss


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> bool:
    alike = torch.equal(left, right)  # infinities among them
    return alike or float((left - right).norm()) <= tolerance * float(right.norm())


def attempt(found: dict[str, Any], name: str, call: Callable[[], Any]) -> bool:
    """Note what the call returns under this name, or the class of the error that refuses it."""
    try:
        found[name] = call()
    except Exception as error:  # noqa: BLE001 - its class is what is recorded
        found[name] = f"refused: {type(error).__name__}"
        sys.stderr.write(f"  {name}: {type(error).__name__}: {str(error)[:300]}\n")
        return False
    return True


def measure(entry: str) -> dict[str, Any]:
    """Return everything that is recorded of an entry."""
    quietly()
    _kernel = generic_kernel()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        measured = refusals if entry.startswith("refusals") else _measure
        return measured(Path(scratch), *entry.split("/"))


def _measure(root: Path, kind: str, codec: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    base, config = root / "base", quantization(codec, kind=kind)
    mxfp4 = codec == "mxfp4"
    cls = write_base(kind, base, codec)
    if codec == "nf4":
        found["dump"] = _dump(base)
        if kind in PLANNED:
            found["plan"] = _plan(base)

    def load(folder: Path, **options: Any) -> Any:
        with moe_qlora.enabled(keep_codes=mxfp4):
            return settle(cls.from_pretrained(folder, dtype=torch.float32, **options))

    model = load(base, quantization_config=config)
    inputs = tiny_inputs(model)
    found["lists"] = {
        "target_parameters": moe_qlora.target_parameters(model),
        "exclude_modules": sha(moe_qlora.exclude_modules(model)),
    }
    found["packed"] = state_hashes(model.state_dict())
    if not mxfp4:
        attempt(found, "built and packed alike", lambda: _built_alike(cls, base, config, model))
    logits = output(model, inputs)
    found["logits"] = {"packed": fingerprint("logits", logits)}
    attempt(found, "folder", lambda: _folder(model, root / "packed"))
    again = load(root / "packed")
    found["reload"] = {"logits equal": torch.equal(output(again, inputs), logits)}
    alike = "quantize_checkpoint alike"
    if mxfp4:
        found[alike] = "not for kept codes"
    else:
        attempt(found, alike, lambda: _checkpoint_alike(base, root, config))
    made: dict[str, Any] = {}
    if not attempt(made, "model", lambda: moe_qlora.get_peft_model(model, lora(model))):
        found["lora"] = made["model"]
        return found
    # A step with LoRA on all layers; the adapter is saved, loaded and merged.
    model = made["model"]
    fill_adapter(settle(model))
    logits, loss = step(model, inputs)
    found["logits"]["lora"] = fingerprint("logits", logits)
    found["loss"] = rounded(loss)
    weights = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    found["gradients"] = fingerprints(weights)
    if attempt(found, "adapter", lambda: _adapter(model, root / "adapter")):
        ours = output(settle(moe_qlora.load_adapter(again, root / "adapter")), inputs)
        found["reload"]["adapter equal"] = {"load_adapter": close(ours, logits.detach(), 1e-5)}
    kept = read_tensors(root / "base")

    def merge(base: str, out: str, **options: Any) -> dict[str, Tensor]:
        moe_qlora.merge_adapter(root / base, root / "adapter", root / out, **options)
        return read_tensors(root / out)

    attempt(found, "merged packed", lambda: fingerprints(merge("packed", "flat"), kept))
    if codec not in ("nf4", "mxfp4"):
        return found
    if attempt(found, "merged", lambda: fingerprints(merge("base", "merged"), kept)):
        plain = settle(cls.from_pretrained(root / "merged", dtype=torch.float32))
        found["logits"]["merged"] = fingerprint("logits", output(plain, inputs))
    flat = read_tensors(root / "flat")

    def as_trained() -> bool:
        settings = {} if mxfp4 else {"quantization_config": config}
        trained = merge("base", "trained", like_training=True, **settings)
        keys = trained.keys() == flat.keys()
        return keys and all(close(trained[name].float(), flat[name].float()) for name in flat)

    attempt(found, "merged like_training is merged packed", as_trained)
    return found


def _built_alike(cls: Any, base: Path, config: Any, loaded: Any) -> bool:
    """Whether a model that is built, and packed then, holds the experts that the loader packed."""
    model = cls.from_pretrained(base, dtype=torch.float32)
    report = moe_qlora.quantize_experts(model, config)
    one, two = model.state_dict(), loaded.state_dict()
    names = [name for name in one if name in two and one[name].dtype in (torch.uint8, torch.int8)]
    assert report and names
    return all(torch.equal(one[name], two[name]) for name in names)


def _checkpoint_alike(base: Path, root: Path, config: Any) -> bool:
    moe_qlora.quantize_checkpoint(base, root / "written", config, dtype=torch.float32)
    one, two = read_tensors(root / "written"), read_tensors(root / "packed")
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _folder(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    tensors = read_tensors(folder)
    # names of files carry a part of a hash
    files = sorted(re.sub(r"[0-9a-f]{8,}", "*", file.name) for file in folder.iterdir())
    return {"files": files, "keys": f"{len(tensors)} {sha(sorted(tensors))}"}


def _adapter(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    fields = ("peft_type", "r", "lora_alpha", "target_parameters", "exclude_modules")
    kept, modules = {name: config[name] for name in fields}, config["target_modules"]
    kept["target_modules"] = sorted(modules) if isinstance(modules, list) else modules
    files = sorted(file.name for file in folder.iterdir())
    tensors = {key: sha(value) for key, value in sorted(read_tensors(folder).items())}
    return {"files": files, "config": sha(kept), "tensors": tensors}


def run_cli(*arguments: object) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and what it printed."""
    printed, code = io.StringIO(), 0
    argv = patch.object(sys, "argv", ["moe-qlora", *map(str, arguments)])
    with argv, redirect_stdout(printed), redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, printed.getvalue()


def _dump(folder: Path) -> dict[str, Any]:
    """Return `dump --json` but for its sentences."""
    code, text = run_cli("dump", folder, "--json")
    told = json.loads(text)
    rows = {row.pop("pattern"): row for row in told["experts"]}
    for row in rows.values():
        del row["evidence"], row["orientation_evidence"]
    routers = {row["name"]: row["num_choices"] for row in told["routers"]}
    found = {name: told[name] for name in ("totals", "quantization", "target_parameters")}
    found |= {"exit code": code, "experts": rows, "routers": routers}
    return found | {"rejected": sorted(row["name"] for row in told["rejected"])}


def _plan(folder: Path) -> dict[str, Any]:
    arguments = ("--gpus", "24GiB", "--seq", "64", "--targets", "attention,experts", "--rank", "4")
    code, text = run_cli("plan", folder, "--json", *arguments)
    told = json.loads(text)
    names = ("trained_weights", "unpacked", "resident", "load_peak", "fit", "fits")
    peak = {"nbytes": told["peak"]["nbytes"], "largest": told["peak"]["largest"]}
    return {"exit code": code, "peak": peak, **{name: told[name] for name in names}}


def refusals(root: Path, *_: str) -> dict[str, str]:
    """Return the class of the error that refuses each call."""
    base, nf4 = root / "base", quantization("nf4")
    cls = write_base("qwen3_moe", base)
    plain: Any = tiny_model("qwen3_moe")
    dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def fresh(kind: str = "qwen3_moe") -> Any:
        made = tiny_model(kind)
        moe_qlora.quantize_experts(made, nf4)
        return made

    packed = fresh()
    packed.save_pretrained(root / "packed")
    model = moe_qlora.get_peft_model(fresh(), lora(packed))
    model.save_pretrained(root / "adapter")
    llama = fresh("llama4_text")
    moe_qlora.offload_experts(hosted := fresh())
    nan: Any = tiny_model("qwen3_moe")
    nan.get_parameter(moe_qlora.detect(nan).experts[0].name).data[0, 0, 0] = float("nan")
    (root / "full").mkdir()
    (root / "full" / "file").write_text("x")
    damaged, other = shutil.copytree(root / "packed", root / "damaged"), root / "other"
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    write_base("mixtral", other)

    def load(folder: Path, config: Any = None, **options: Any) -> Any:
        with moe_qlora.enabled(**options):
            return cls.from_pretrained(folder, quantization_config=config)

    def adapt(target: Any, **settings: Any) -> Any:
        return m.get_peft_model(target, lora(target, **settings))

    def cli(*arguments: object) -> None:
        raise SystemExit(run_cli(*arguments)[0])

    def fit(target: Any, **sizes: Any) -> Any:
        return m.fit_memory(target, **{"batch_size": 2, "seq_len": 8} | sizes)

    def merge(base: Path, adapter: Path, out: str = "out", **options: Any) -> Any:
        return m.merge_adapter(base, adapter, root / out, **options)

    def export(target: str, out: str = "export") -> Any:
        return m.export_adapter(root / "adapter", root / out, base=base, target=target)

    m: Any = moe_qlora
    q, write, plan, get = m.quantize_experts, m.quantize_checkpoint, m.plan, m.get_peft_model
    adapter, new, none, full = root / "adapter", root / "new", root / "nowhere", root / "full"
    int4, int8 = {**NF4, "bnb_4bit_quant_type": "int4"}, quantization("int8")
    bad_pattern = BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["re:("])
    meta = tiny_model("qwen3_moe", device="meta")
    vera = VeraConfig(target_modules=["experts"])
    ia3 = IA3Config(target_modules=["experts"], feedforward_modules=[])
    owners, drop, packing = ["experts"], {"lora_dropout": 0.1}, {"quantization_config": nf4}
    peft, save = PeftModel.from_pretrained, packed.save_pretrained
    one = LoraConfig(target_parameters=m.target_parameters(packed)[:1])
    state: dict[str, Any] = {"state_dict": plain.state_dict()}
    small: dict[str, Any] = {"batch_size": 2, "seq_len": 8, "memory": 1000}
    calls: dict[str, Callable[[], Any]] = {
        "quantize_experts: no config": lambda: q(plain),
        "quantize_experts: a number for a config": lambda: q(plain, 4),
        "quantize_experts: the class": lambda: q(plain, BitsAndBytesConfig),
        "quantize_experts: int4": lambda: q(plain, int4),
        "quantize_experts: bad pattern": lambda: q(plain, bad_pattern),
        "quantize_experts: no experts": lambda: q(dense, nf4),
        "quantize_experts: no model": lambda: q("qwen3_moe", nf4),
        "quantize_experts: NaN": lambda: q(nan, nf4),
        "quantize_experts: packed as nf4, asked for int8": lambda: q(packed, int8),
        "quantize_experts: on meta": lambda: q(meta, nf4),
        "detect: no model": lambda: m.detect("qwen3_moe"),
        "exclude_modules: a number": lambda: m.exclude_modules(packed, 3),
        "target_parameters: a number": lambda: m.target_parameters(packed, 3),
        "adapt_lora_config: no config": lambda: m.adapt_lora_config(packed, {"r": 8}),
        "get_peft_model: DoRA": lambda: adapt(packed, use_dora=True),
        "get_peft_model: PiSSA": lambda: adapt(packed, init_lora_weights="pissa"),
        "get_peft_model: bias": lambda: adapt(packed, lora_bias=True),
        "get_peft_model: dropout, experts that read the weight": lambda: adapt(llama, **drop),
        "get_peft_model: a second time": lambda: get(model, lora(packed)),
        "get_peft_model: layers without experts": lambda: adapt(packed, layers_to_transform=[9]),
        "get_peft_model: modules_to_save of experts": lambda: adapt(packed, modules_to_save=owners),
        "get_peft_model: VeRA on experts": lambda: get(packed, vera),
        "get_peft_model: IA3 on experts": lambda: get(packed, ia3),
        "add_adapter: other parameters": lambda: model.add_adapter("two", one),
        "load_adapter: no folder": lambda: m.load_adapter(packed, none),
        "load_adapter: a taken name": lambda: m.load_adapter(model, adapter),
        "load_adapter: of another model": lambda: m.load_adapter(fresh("mixtral"), adapter),
        "PeftModel.from_pretrained: no folder": lambda: peft(packed, str(none)),
        "merge_adapter (PEFT): experts in host memory": lambda: adapt(hosted).merge_adapter(),
        "merge_adapter: no base": lambda: merge(none, adapter),
        "merge_adapter: no adapter": lambda: merge(base, none),
        "merge_adapter: swapped": lambda: merge(adapter, base),
        "merge_adapter: out is full": lambda: merge(base, adapter, "full"),
        "merge_adapter: dtype int8": lambda: merge(base, adapter, dtype=torch.int8),
        "merge_adapter: base of another type": lambda: merge(other, adapter, any_base=True),
        "merge_adapter: config without like_training": lambda: merge(base, adapter, **packing),
        "quantize_checkpoint: no folder": lambda: write(root / "x", new, nf4),
        "quantize_checkpoint: packed": lambda: write(root / "packed", new, nf4),
        "quantize_checkpoint: full": lambda: write(base, full, nf4),
        "quantize_checkpoint: a number": lambda: write(base, new, 4),
        "from_pretrained: damaged packed folder": lambda: load(damaged),
        "from_pretrained: packed, other codec": lambda: load(root / "packed", int8),
        "enabled: keep_codes without codes": lambda: load(base, nf4, keep_codes=True),
        "enabled: offload of an unknown kind": lambda: load(base, nf4, offload="moon"),
        "offload_experts: not packed": lambda: m.offload_experts(plain),
        "offload_experts: too many layers": lambda: m.offload_experts(packed, layers=99),
        "fit_memory: nothing trained": lambda: fit(packed.requires_grad_(False), memory="1GiB"),
        "fit_memory: no memory on a CPU": lambda: fit(model),
        "fit_memory: too little": lambda: fit(model, memory=1000),
        "fit_memory: no text": lambda: fit(model, memory="much"),
        "fit_memory: batch of 0": lambda: fit(model, memory="1GiB", batch_size=0),
        "prepare_training: too little": lambda: m.prepare_training(model, **small),
        "plan: no such model": lambda: plan(str(none)),
        "plan: an unknown card": lambda: plan(str(base), nf4, gpus="1xMoon"),
        "plan: batch of 0": lambda: plan(str(base), nf4, batch_size=0),
        "plan: an unknown target": lambda: plan(str(base), nf4, lora="moon"),
        "export_adapter: an unknown server": lambda: export("moon"),
        "export_adapter: full folder": lambda: export("vllm", "full"),
        "save_pretrained of packed weights in a state dict": lambda: save(new, **state),
        "cli dump: no such model": lambda: cli("dump", none),
        "cli dump: two formats": lambda: cli("dump", base, "--json", "--yaml"),
        "cli plan: does not fit": lambda: cli("plan", base, "--gpus", "1MiB", "--seq", "8"),
        "cli verify: damaged": lambda: cli("verify", damaged),
        "cli merge: no adapter": lambda: cli("merge", base, root / "no", "-o", root / "out"),
        "cli: no such command": lambda: cli("moon"),
    }
    return {name: _class_of_error(call) for name, call in calls.items()}


def _class_of_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SystemExit as end:
        return f"exit {end.code}"
    except Exception as error:  # noqa: BLE001 - its class is what is recorded
        ours = "" if isinstance(error, moe_qlora.MoeQloraError) else " (not of this package)"
        return f"{type(error).__name__}{ours}"
    return "not refused"


def measure_gpu(entry: str, device: str) -> dict[str, Any]:
    """Return the losses of three steps, bfloat16 on CUDA, and the gradients of the last.

    A CUDA graph replays the last step by then.
    """
    quietly()
    kind, codec, way = entry.split("/")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    place: dict[str, Any] = {"device_map": {"": device}, "dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        write_base(kind, Path(folder), codec)
        config = quantization(codec, dtype)
        with moe_qlora.enabled(keep_codes=codec == "mxfp4"):
            load = AutoModelForCausalLM.from_pretrained
            model: Any = load(folder, quantization_config=config, **place)
    found: dict[str, Any] = {"packed": state_hashes(model.state_dict())}
    model = moe_qlora.get_peft_model(model, lora(model))
    fill_adapter(model)
    model.train()
    seq = KEPT_SEQ if way == "part" else SEQ
    sizes: dict[str, Any] = {"batch_size": BATCH, "seq_len": seq}
    with ExitStack() as stack:
        if "offloaded" in way:
            off = stack.enter_context(moe_qlora.offload_experts(model))
            found["host_nbytes"] = off.host_nbytes
        if "recorded" in way:
            sizes |= {} if device == "cuda" else {"memory": "8GiB"}
            prepared = stack.enter_context(moe_qlora.prepare_training(model, **sizes))
            found["prepared"] = sorted({line.split(":")[0] for line in str(prepared).splitlines()})
        for module in model.modules() if way == "compiled" else ():
            if type(module).__name__.endswith("DecoderLayer"):
                module.compile()
        if way == "part":
            stack.enter_context(_kept_in_part(model, sizes))
        trained = {n: weight for n, weight in model.named_parameters() if weight.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
        ids = torch.randint(5, 100, (BATCH, seq), generator=torch.Generator().manual_seed(0))
        ids = ids.to(device)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found[f"loss {number}"] = rounded(loss.detach())
            found["gradients"] = fingerprints({n: w.grad for n, w in trained.items()})
            optimizer.step()
    return found


def _kept_in_part(model: Any, sizes: dict[str, Any]) -> Any:
    """Return the fit of the most memory, of a few, that does not hold all activations."""
    for _ in range(2):  # The first also finds what CUDA's libraries take at their first call
        whole = moe_qlora.fit_memory(model, **sizes, memory="8GiB")
        whole.remove()
    for part in range(990, 600, -5):
        fit = moe_qlora.fit_memory(model, **sizes, memory=whole.peak * part // 1000)
        if any(layer.activations != "keep" for layer in fit.layers):
            return fit
        fit.remove()
    raise AssertionError("no memory is too small to keep everything")
