"""Run the study: workers that share a GPU, and a summary at the end.

PYTHONPATH=tools python -m study.run --out DIR --corpus FILE --seconds 540
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .finish import finish

TOOLS = Path(__file__).parents[1]


def main() -> None:
    """Start the workers, wait for them or the deadline, and write tokens.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--workers", type=int, default=10)
    options, rest = parser.parse_known_args()
    begin = time.time()
    deadline = begin + options.seconds - 8  # for the workers' end and the summary
    options.out.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        work = Path(folder)
        command = [sys.executable, "-m", "study.worker", "--work", folder]
        command += ["--out", str(options.out.resolve()), "--corpus", str(options.corpus.resolve())]
        command += ["--deadline", str(deadline), *rest]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        with (options.out / "log.txt").open("w") as log:
            workers = [
                subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                for _ in range(options.workers)
            ]
            try:
                _wait(workers, deadline + 4, options.out)
            finally:
                for worker in workers:
                    worker.kill()
                for worker in workers:
                    worker.wait()
        finish(work, options.out)
    print(f"{time.time() - begin:.0f} s; {_count(options.out)}", flush=True)


def _wait(workers: list[subprocess.Popen[bytes]], until: float, out: Path) -> None:
    said = 0.0
    while time.time() < until and any(worker.poll() is None for worker in workers):
        time.sleep(0.5)
        if time.time() - said > 20:
            said = time.time()
            print(f"{time.strftime('%X')} {_count(out)}", flush=True)


def _count(out: Path) -> str:
    counts = []
    for name in ("base", "runs", "experts", "tokens", "failures"):
        file = out / f"{name}.csv"
        lines = len(file.read_text().splitlines()) - 1 if file.exists() else 0
        counts.append(f"{lines} lines of {name}")
    return ", ".join(counts)


if __name__ == "__main__":
    main()
