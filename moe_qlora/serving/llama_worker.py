"""Run prompts through llama.cpp, as a separate program in llama.cpp's environment.

    python llama_worker.py JOB RESULT

JOB is a JSON file: `model` (a folder), `adapters` (folders, one pair for each expert), `prompts`
(lists of token ids), `dtype` (of the GGUF), `llama_cpp` (the source folder with its converters) and
`work` (an empty folder). llama.cpp's own converters write GGUF files there, and llama-cpp-python
runs them. RESULT is that of vllm_worker.py. This package is not needed in that environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"runs": []}
    try:
        import llama_cpp

        result["version"] = f"llama-cpp-python {llama_cpp.__version__}"
        work, kind = Path(job["work"]), _TYPES[job["dtype"]]
        model = work / "base.gguf"
        _convert(job, "convert_hf_to_gguf.py", job["model"], model, kind)
        result["runs"].append({"logprobs": _logprobs(model, None, job["prompts"])})
        for number, folder in enumerate(job["adapters"], 1):
            result["runs"].append(
                _adapter(job, model, folder, work / f"adapter{number}.gguf", kind)
            )
    except Exception as error:  # noqa: BLE001 - reported by the caller
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _adapter(
    job: dict[str, Any], model: Path, folder: str, file: Path, kind: str
) -> dict[str, Any]:
    try:
        _convert(job, "convert_lora_to_gguf.py", folder, file, kind, "--base", job["model"])
        return {"logprobs": _logprobs(model, file, job["prompts"])}
    except Exception as error:  # noqa: BLE001 - one adapter that does not load is an answer
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _convert(
    job: dict[str, Any], script: str, source: str, out: Path, kind: str, *more: str
) -> None:
    program = str(Path(job["llama_cpp"]) / script)
    call = [sys.executable, program, source, "--outfile", str(out), "--outtype", kind, *more]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    if run.returncode or not out.is_file():
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"{script}: {lines[-1] if lines else 'it wrote nothing'}")


def _logprobs(model: Path, adapter: Path | None, prompts: list[list[int]]) -> list[list[float]]:
    import llama_cpp
    import numpy as np

    engine = llama_cpp.Llama(
        str(model),
        lora_path=str(adapter) if adapter else None,
        n_ctx=max(64, *map(len, prompts)),
        type_k=llama_cpp.GGML_TYPE_F32,  # a cache in 16 bit would be most of the noise
        type_v=llama_cpp.GGML_TYPE_F32,
        n_gpu_layers=0,
        n_threads=2,
        logits_all=True,
        verbose=False,
    )
    rows = []
    for prompt in prompts:
        engine.reset()
        engine.eval(prompt)
        scores = np.asarray(engine.scores[: len(prompt) - 1], dtype=np.float64)
        top = scores.max(-1, keepdims=True)
        logprobs = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
        rows.append([float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=True)])
    return rows


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
