"""Loading a share at a time: what the ranks hold together is what one process loads, bit for bit.

Four processes serve every case: as four shards, as two copies of two, and as three of them.
"""

import copy
import ctypes
import gc
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.checkpoint import manifest
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.prequantized import write_case
from tests.helpers.ranks import are_same, said, sharded
from tests.helpers.training import NF4, loaded, token_batches, train, whole

# No power of two: shares end within experts, within blocks of Linear layers, and within the absmax.
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "vocab_size": 258,
}  # fmt: skip
FP32 = {**NF4, "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "nf4": FP32,
    "float storage": {
        **FP32, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32
    },
    "int8": {"load_in_8bit": True},
    # parameters that are dequantized, and sharded as they are
    "skips": {**FP32, "llm_int8_skip_modules": ["self_attn", "layers.1.mlp", "lm_head"]},
}  # fmt: skip
# Folders that their makers quantized
FP8, MXFP4, NVFP4 = "deepseek_v3 fp8", "gpt_oss mxfp4", "qwen3_moe modelopt nvfp4"
LORA = LoraConfig(
    r=4,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
# case -> (folder, settings or None for a packed folder, mesh; None: by transformers' own loader)
CASES = {
    "packed float storage on 3": ("float storage", None, "three"),
    "fused on disk on 4": ("fused", "nf4", "all"),
    "nf4 by transformers": ("plain", "nf4", None),
    "packed int8 by transformers": ("int8", None, None),
    "nvfp4 on 4": (NVFP4, "int8", "all"),
    "mxfp4 on 2": (MXFP4, "int8", "copies"),
    "fp8 by transformers": (FP8, "skips", None),
}
SHARDS = {"all": 4, "copies": 2, "three": 3, None: 4}
# What memory is measured with: 50 MB of packed experts, in bytes of which much else is small.
LARGE = {
    "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 8, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    tiny_model("qwen3_moe", **SIZES).to(torch.bfloat16).save_pretrained(root / "plain")
    fused = {**SIZES, "num_local_experts": 6, "intermediate_size": 48}
    tiny_model("gpt_oss", **fused).to(torch.bfloat16).save_pretrained(root / "fused")
    for kind in ("float storage", "int8"):
        load_whole(root / "plain", kind).save_pretrained(root / kind)
    tiny_model("qwen3_moe", dtype=torch.bfloat16, **LARGE).save_pretrained(root / "large")
    for case in (FP8, MXFP4, NVFP4):
        write_case(root / case, case)
    return {folder.name: folder for folder in root.iterdir()}


def load_whole(folder, kind, ranks=1):
    """Load by transformers; where there are several ranks, a share on each."""
    more = {"distributed_config": DistributedConfig(fsdp_size=ranks)} if ranks > 1 else {}
    return loaded(folder, kind and KINDS[kind], dtype=torch.bfloat16, **more)


def load_kept(folder, **more):
    """The model whose experts keep their MXFP4 codes."""
    with moe_qlora.enabled(keep_codes=True):
        return loaded(folder, **more)


def adapted(model, seed=7):
    torch.manual_seed(seed)
    return moe_qlora.get_peft_model(model, copy.deepcopy(LORA))


def logits(model):
    return model(input_ids=torch.arange(8)[None]).logits.detach()


def tensors_of(model):
    """Every parameter and buffer, gathered."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: whole(tensor).detach().clone() for name, tensor in named}


def bytes_of(model):
    """What this rank holds of parameters."""
    return sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())


@contextmanager
def counted_reads():
    """Count the bytes on disk that are read of expert weights."""
    count = SimpleNamespace(total=0)

    def counting(stock):
        def read(files, key, *args, **named):
            tensor = stock(files, key, *args, **named)
            count.total += tensor.nbytes if ".experts." in key else 0
            return tensor

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "read_bytes"):
            patch.setattr(Checkpoint, name, counting(getattr(Checkpoint, name)))
        patch.setattr(manifest, "_SMALL", 0)  # checksums read small tensors whole
        yield count


@contextmanager
def watched_memory():
    """Watch this process's anonymous memory: `rise` has the bytes of its highest rise."""

    def now():
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])

    def watch():
        while not done.wait(0.002):
            found.rise = max(found.rise, now() - start)

    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once, uncounted
    libc.malloc_trim(0)
    start, done, found = now(), threading.Event(), SimpleNamespace(rise=0)
    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    done.set()
    thread.join()


def run_cases(rank, world, folders):
    meshes = {
        "all": init_device_mesh("cpu", (world,)),
        "copies": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")),
        "three": DeviceMesh("cpu", [0, 1, 2]),
    }
    moe_qlora.load_sharded(folders["plain"], KINDS["nf4"])  # imports what is imported late
    with watched_memory() as memory:
        model = moe_qlora.load_sharded(folders["large"], KINDS["nf4"], dtype=torch.bfloat16)
    results = {"rise": memory.rise, "share": bytes_of(model)}
    for case, (folder, kind, mesh) in CASES.items():
        if mesh == "three" and rank == 3:
            continue
        torch.manual_seed(7 + rank)  # ranks must not depend on their own generators
        with counted_reads() as reads:
            if mesh is None:
                model = load_whole(folders[folder], kind, ranks=world)
            else:
                model = moe_qlora.load_sharded(
                    folders[folder], kind and KINDS[kind], meshes[mesh],
                    lora_config=copy.deepcopy(LORA), dtype=torch.bfloat16,
                )  # fmt: skip
        tensors = tensors_of(model)
        results[case] = {
            "tensors": {} if rank else tensors,
            "is_sharded": isinstance(model, FSDPModule),
            "bytes": bytes_of(model),
            "read": reads.total,
        }
        if case == "nf4 by transformers":
            copies = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
            no_copies = said(moe_qlora.get_peft_model, model, copies)
            model = adapted(model, 7 + rank)
            results["losses"] = train(model, token_batches(0, 3, 4), rank, world)
            results["adapters"] = [p.detach() for p in model.parameters() if p.requires_grad]
    results["kept"] = logits(sharded(load_kept(folders[MXFP4])))
    return results | {"refused": refusals(folders, rank) | {"copies": no_copies}}


def refusals(folders, rank):
    pissa = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")
    folder, nf4, stock = folders["plain"], KINDS["nf4"], Checkpoint.read
    asked = DistributedConfig(fsdp_size=4)

    def read(files, key, *args):
        tensor = stock(files, key, *args)
        return tensor * torch.nan if rank == 1 and "experts" in key else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read", read)
        not_finite = said(moe_qlora.load_sharded, folder, nf4)
    return {
        "no settings": said(moe_qlora.load_sharded, folder),
        "pissa": said(moe_qlora.load_sharded, folder, nf4, lora_config=pissa),
        "no layer": said(moe_qlora.load_sharded, folder, nf4, wrap=["Nothing"]),
        "kept": said(load_kept, folders[MXFP4], distributed_config=asked),
        "not finite": not_finite,
    }


@pytest.fixture(scope="module")
def ranks(folders):
    return run_distributed(run_cases, 4, folders)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_and_reads_its_share_of_the_whole_model_alone(ranks, folders, case):
    folder, kind, mesh = CASES[case]
    model = load_whole(folders[folder], kind)
    moe_qlora.prepare_sharding(model)
    expected = tensors_of(model if mesh is None else adapted(model))
    shards, loads = SHARDS[mesh], [rank[case] for rank in ranks if case in rank]
    tensors = loads[0]["tensors"]
    assert tensors.keys() == expected.keys()
    assert are_same({name: tensors[name] for name in expected}, expected)
    assert all(one["is_sharded"] for one in loads)
    buffers = ("tables", "inv_freq", "e_score_correction_bias")
    stored = sum(t.nbytes for n, t in tensors.items() if not n.endswith(buffers))
    held = [one["bytes"] for one in loads]
    assert sum(held[:shards]) == stored and max(held) < 1.1 * stored / shards
    files = Checkpoint(sorted(folders[folder].glob("*.safetensors")))
    experts = [key for key in files if ".experts." in key and "layers.2." not in key]
    stored = sum(files.info(key).nbytes for key in experts)
    weights = {key.rpartition(".experts.")[0] for key in experts}
    # Packed: tables and records of each weight. Else: the experts in which a share begins and ends.
    slack = 2 * len(weights) * (2048 if kind is None else 2 * 96 * 64 * 2)
    if folder in (FP8, MXFP4, NVFP4):  # scales of whole rows
        slack = stored * 0.15
    assert all(one["read"] <= stored / shards + slack for one in loads)


def test_adapters_on_a_sharded_model_train_alike(ranks, folders):
    expected = train(adapted(load_whole(folders["plain"], "nf4")), token_batches(0, 3, 4))
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, abs=2e-2)  # bfloat16
    first, *others = (rank["adapters"] for rank in ranks)
    assert len(first) == 2 * 2 * 4 + 2 * 2 * 2
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_memory_holds_a_share_and_little_else(ranks):
    total = sum(rank["share"] for rank in ranks)
    assert total > 50e6
    for rank in ranks:
        assert rank["rise"] < rank["share"] + 0.2 * total


def test_kept_codes_are_sharded_after_the_load(ranks, folders):
    expected = logits(load_kept(folders[MXFP4]))
    assert all(torch.equal(rank["kept"], expected) for rank in ranks)


REFUSED = {
    "no settings": "ConfigError.* give a quant",
    "pissa": "ConfigError.* init_lora_weights='pissa'",
    "no layer": "ConfigError.* decoder",
    "copies": "ConfigError.* FSDP2 has sharded them already",
    "kept": "CheckpointError.* keeps the MXFP4 codes .* not shard.* after it is loaded",
}


def test_what_cannot_be_followed_is_said(ranks):
    for rank, texts in enumerate(one["refused"] for one in ranks):
        for case, words in REFUSED.items():
            assert re.match(words, texts[case]), texts[case]
        own = "NonFiniteWeightError.* holds NaN or inf"
        said = own if rank == 1 else "QuantizationError.*Another rank could not pack"
        assert re.match(said, texts["not finite"]), texts["not finite"]
