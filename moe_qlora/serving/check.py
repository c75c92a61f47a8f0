"""Check that a server computes the trained model.

The same prompts go through the model here and through the server's engine in another process
(`vllm_worker.py`, `llama_worker.py`), each with and without the adapter. The difference of the two
bases is numerical noise; the effects of the adapter must agree within it.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..checkpoint.adapter import CONFIG, WEIGHTS
from ..checkpoint.staging import absolute
from ..errors import CheckpointError, ConfigError, MoeQloraError, first_line
from ..layout import dtype_name
from ..lora.load import load_adapter
from ..models.files import read_json
from .export import export_adapter

ENGINES = {"vllm": "vllm", "llama.cpp": "gguf"}  # the export target of each server
_WORKERS = {"vllm": "vllm_worker.py", "llama.cpp": "llama_worker.py"}
_CONVERTER = "convert_hf_to_gguf.py"  # of llama.cpp
_SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",  # engine in the worker, for experts on a CPU
    "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=ERROR",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "HF_HUB_OFFLINE=1",
)
_PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog",
    "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    "In 1969 the first people landed on the Moon, which is about 384,400 km",
    "Die Katze sitzt auf der Matte und schaut aus dem Fenster.",
)
_NOISES = 3.0  # largest error of an adapter, in multiples of the noise
_SHARE = 0.02  # and in addition, as a share of its effect
_LITTLE = 0.1  # share of the effect here; below it, the server has no effect


@dataclass(frozen=True)
class ServeReport:
    """Comparison of a server's logprobs with ours, in nats; means over tokens.

    Attributes:
        server: The engine and its version.
        verdict: "agrees", "off", "no effect", "not loaded", or "cannot tell": the adapter's effect
            is within the noise, or logprobs of a base or of ours are not finite.
        noise: Difference of the two bases.
        error: Difference of the two adapted models.
        effect, served_effect: Change by the adapter, here and at the server.
        tokens: Number of compared logprobs.
        refusal: The server's error, if it did not load the adapter.
        note: Parts of the server that were replaced, or logprobs that are not finite, or "".
    """

    server: str
    verdict: str
    noise: float
    error: float
    effect: float
    served_effect: float
    tokens: int
    refusal: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the server computes the trained model."""
        return self.verdict == "agrees"

    def __str__(self) -> str:
        if self.verdict == "not loaded":
            return f"{self.server} did not load the adapter: {self.refusal}"
        said = {
            "agrees": "serves what was trained",
            "off": "serves something else than was trained",
            "no effect": "serves the base: the adapter has no effect there",
            "cannot tell": "cannot be told apart from its base: the adapter's effect is within the "
            "noise of the arithmetic"
            if math.isfinite(self.noise + self.effect)
            else "cannot be compared",
        }[self.verdict]
        note = f"\n  {self.note}" if self.note else ""
        return (
            f"{self.server} {said}.\n"
            f"  mean difference of {self.tokens} logprobs, server to here: base {self.noise:.2g}, "
            f"adapted {self.error:.2g}\n"
            f"  what the adapter changes: here {self.effect:.2g}, at the server "
            f"{self.served_effect:.2g}{note}"
        )


def serve_check(
    base: str | Path,
    adapter: str | Path,
    *,
    server: str,
    python: str | Path | None = None,
    llama_cpp: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    prompts: Sequence[str] | Sequence[Sequence[int]] | None = None,
    as_it_is: bool = False,
    any_base: bool = False,
    timeout: float = 1800,
) -> ServeReport:
    """Compare a server's logprobs with an adapter with those of the model here.

    Args:
        base: The folder of the served 16-bit model.
        adapter: The adapter's folder. It is exported for the server first.
        server: "vllm" or "llama.cpp".
        python: The interpreter of the server's environment; None for this one.
        llama_cpp: For llama.cpp: its source folder with the converters to GGUF.
        dtype: Compute dtype of both.
        prompts: Texts, or lists of token ids; None for built-in texts, or random tokens if the base
            has no tokenizer. Prompts of fewer than two tokens are left out.
        as_it_is: True passes the adapter's folder to the server without an export.
        any_base: True takes a base that is not the model in the adapter's note.
        timeout: Seconds until the server is stopped.

    Raises:
        CheckpointError: A folder is missing, damaged or of another kind.
        AdapterError: The adapter does not fit the base, or cannot be exported for the server.
        ConfigError: The server is not known or cannot be started, or does not serve this base.
    """
    if server not in ENGINES:
        raise ConfigError(f"server is {server!r}; give one of {', '.join(ENGINES)}.")
    if server == "llama.cpp" and not (llama_cpp and Path(llama_cpp, _CONVERTER).is_file()):
        raise ConfigError(
            f"llama_cpp (--llama-cpp) is {llama_cpp}; name llama.cpp's source folder, which holds "
            f"{_CONVERTER}."
        )
    source, folder = absolute(base), absolute(adapter)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_qlora-")))
        served = folder
        if not as_it_is:
            served = work / "adapter"
            target = ENGINES[server]
            export_adapter(folder, served, base=source, target=target, any_base=any_base)
        ids = _token_ids(source, prompts)
        ours = local_logprobs(source, folder, ids, dtype, any_base)
        (work / "gguf").mkdir()
        job = {
            "model": str(source),
            "adapters": [str(served)],
            "prompts": ids,
            "dtype": dtype_name(dtype),
            "rank": _largest_rank(served),
            "mixed": False,
            "llama_cpp": str(llama_cpp),
            "work": str(work / "gguf"),
        }
        result = run_worker(server, job, work, python, timeout)
    return compare(server, ours, result)


def run_worker(
    server: str, job: dict[str, Any], work: Path, python: str | Path | None, timeout: float
) -> dict[str, Any]:
    """Run a server's worker on a job, and return its result; files go to the folder `work`."""
    interpreter = str(python or sys.executable)
    if shutil.which(interpreter) is None:
        raise ConfigError(f"python (--python) is {interpreter}, which cannot be run.")
    worker = Path(__file__).with_name(_WORKERS[server])
    job_file, result_file, log = work / "job.json", work / "result.json", work / "log.txt"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    call = ["env", *_SETTINGS, interpreter, str(worker), str(job_file), str(result_file)]
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(
                call, stdout=output, stderr=subprocess.STDOUT, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{server} did not answer in {timeout:.0f} s; give timeout more, or a smaller base."
            ) from error
    if not result_file.is_file():
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        lines = said.splitlines() or ["it ended without a word; name a Python that has it"]
        raise ConfigError(f"{server} could not be run by {interpreter}: {lines[-1].strip()}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise ConfigError(
            f"{server} {result.get('version', '')} cannot serve {job['model']}: {_error(result)}"
        )
    if "error" in result["runs"][0]:
        raise ConfigError(f"{server} cannot serve {job['model']}: {_error(result['runs'][0])}")
    return result


def compare(server: str, ours: Sequence[list[float]], result: dict[str, Any]) -> ServeReport:
    """Compare flat logprobs of the base and the adapted model with a worker's result."""
    base, adapted = (torch.tensor(run, dtype=torch.float64) for run in ours)
    name = f"{server} {result['version']}".replace("llama.cpp llama-cpp", "llama-cpp")
    note = ""
    if result.get("experts_in_torch"):
        note = "vLLM has no LoRA on experts for CPUs: plain torch multiplied what it had loaded"
    runs = result["runs"]
    served = _flat(runs[0]["logprobs"])
    noise, effect = _mean(served - base), _mean(adapted - base)
    if "error" in runs[1]:
        return ServeReport(
            name, "not loaded", noise, float("nan"), effect, 0.0, len(base), _error(runs[1]), note
        )
    served_adapted = _flat(runs[1]["logprobs"])
    error, served_effect = _mean(served_adapted - adapted), _mean(served_adapted - served)
    every = {
        "the base here": base,
        "the adapted model here": adapted,
        "the base at the server": served,
        "the adapted model at the server": served_adapted,
    }
    wrong = [where for where, values in every.items() if not bool(values.isfinite().all())]
    if wrong:
        note = "; ".join([*filter(None, [note]), f"logprobs of {wrong[0]} are not all finite"])
    if not math.isfinite(noise + effect) or effect <= _NOISES * noise:
        verdict = "cannot tell"
    elif served_effect < _LITTLE * effect:
        verdict = "no effect"
    else:
        verdict = "agrees" if error <= _NOISES * noise + _SHARE * effect else "off"
    return ServeReport(
        name, verdict, noise, error, effect, served_effect, len(base), "", note
    )  # fmt: skip


def _error(result: dict[str, Any]) -> str:
    return " ".join(str(result["error"]).split())


def _flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _mean(difference: torch.Tensor) -> float:
    return float(difference.abs().mean())


def _token_ids(
    base: Path, prompts: Sequence[str] | Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """Return the prompts as token ids, at least two of each."""
    texts = _PROMPTS if prompts is None else prompts
    if not texts or not isinstance(texts[0], str):
        given = [list(map(int, one)) for one in texts if len(one) > 1]
        if not given:
            raise ConfigError("prompts holds no prompt of two tokens or more; give longer ones.")
        return given
    from transformers import AutoTokenizer

    why = "it makes no tokens of them"
    ids: list[list[int]] = []
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(base))
        ids = [tokenizer(text)["input_ids"][:64] for text in texts]
    except Exception as error:  # noqa: BLE001 - any tokenizer may raise anything
        why = first_line(error)
    ids = [one for one in ids if len(one) > 1]
    if ids:
        return ids
    if prompts is not None:
        raise CheckpointError(
            f"The tokenizer of {base} cannot read the prompts ({why}); pass them as token ids."
        )
    config = read_json(base / "config.json")
    size = int((config.get("text_config") or config).get("vocab_size", 32))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (4, 16), generator=generator).tolist()


def local_logprobs(
    base: Path, adapter: Path | None, prompts: list[list[int]], dtype: torch.dtype, any_base: bool
) -> tuple[list[float], list[float]]:
    """Compute each token's logprob in this process, without the adapter and with it, flat.

    Without an adapter both are the base's.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=dtype)
    except (OSError, ValueError) as error:
        if isinstance(error, MoeQloraError):
            raise
        raise CheckpointError(f"{base} cannot be loaded: {first_line(error)}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()

    def logprobs() -> list[float]:
        rows: list[float] = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, :-1].double()
            rows += logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return rows

    without = logprobs()
    if adapter is None:
        return without, without
    load_adapter(model, str(adapter), any_base=any_base, unpacked_ok=True)
    return without, logprobs()


def _largest_rank(adapter: Path) -> int:
    """Return the largest rank in an adapter's config; raise for a damaged file."""
    config = read_json(adapter / CONFIG)
    with safe_open(adapter / WEIGHTS, framework="pt"):
        pass
    return max([int(config.get("r", 8)), *(config.get("rank_pattern") or {}).values()])
