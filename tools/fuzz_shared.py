"""What fuzzers of folders share: odd values, edits of JSON, how calls end, forked children."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from moe_qlora.errors import MoeQloraError

FAILED = ("changed", "raised", "crashed", "hung")
BATCH = 40  # mutations in one child

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 63, 65, 128, 255, 256, 257, 4096, 2**31, 2**40, 2**63),
    *(0.5, 64.0, 1e300, float("nan"), float("inf"), "", "x", "64", "nf4", "fp4", "int8", "float64"),
    *("float16", "bfloat16", "float32", "uint8", [], {}, [0], [1, 1], [-4, 8], [2**33, 2], [1.5]),
)


def prepare_process() -> None:
    """Silence this process and keep it to one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    disable_progress_bar()
    torch.set_num_threads(1)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def edit(value: dict[str, Any], rng: random.Random, odd: Sequence[Any] = ODD) -> str:
    """Change one place of a JSON value, each depth as often as another."""
    every = list(places(value))
    depth = rng.choice(sorted({len(path) for path in every}))
    path = rng.choice([path for path in every if len(path) == depth])
    holder: Any = value
    for key in path[:-1]:
        holder = holder[key]
    before, key = holder[path[-1]], path[-1]
    way = rng.random()
    if way < 0.2:
        del holder[key]
        return f"{path} removed"
    if way < 0.5 and isinstance(before, int) and not isinstance(before, bool):
        holder[key] = rng.choice([before + 1, before - 1, before * 2, before // 2, -before])
    else:
        holder[key] = copy.deepcopy(rng.choice(odd))
    return f"{path} {before!r:.40} -> {holder[key]!r:.40}"


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Return what tells tensors apart."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def ending(call: Callable[[], Any], loads: bool) -> tuple[str, str, Any]:
    """Call; return "done", "refused", "foreign" or "raised", a message, and the call's result.

    `loads` says that transformers may answer before moe_qlora is asked.
    """
    try:
        return "done", "", call()
    except MoeQloraError as error:
        text = str(error)
        plain = "\n" not in text and len(text) < 2000
        return ("refused", text, None) if plain else ("raised", f"of several lines: {text}", None)
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        # The switch stands in for this method of transformers, and calls it: not ours.
        answered = [f for f in frames[:-1] if f.name != "merge_quantization_configs"] + frames[-1:]
        ours = any("moe_qlora" in Path(frame.filename).parts[:-1] for frame in answered)
        end = "raised" if ours or not loads else "foreign"
        return end, f"{type(error).__name__}: {error}", None


Say = Callable[..., None]
"""Writes a line: number, step and what was mutated before a step; how it ended, and why, after."""


def run_children(
    batch: Callable[[list[int], Say], None], numbers: list[int], limit: float = 120.0
) -> Iterator[list[Any]]:
    """Yield [number, step, what, end, message] of each step of each mutation.

    `batch` runs in forked children, for some mutations each. What ends a child, or says nothing
    for `limit` seconds, counts as that step's end ("crashed" or "hung"); a new child goes on.
    """
    while numbers:
        done, last = _run_child(batch, numbers[:BATCH], limit)
        numbers = [number for number in numbers if number > last]
        yield from done


def _say(out: int, *parts: Any) -> None:
    os.write(out, (json.dumps(parts) + "\n").encode())


def _run_child(
    batch: Callable[[list[int], Say], None], numbers: list[int], limit: float
) -> tuple[list[list[Any]], int]:
    read, written = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            batch(numbers, partial(_say, written))
        except BaseException:  # noqa: BLE001 - a fault of the tool: say so and go
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    os.close(written)
    raw, hung = b"", False
    while not hung:
        ready, _, _ = select.select([read], [], [], limit)
        hung = not ready
        part = os.read(read, 1 << 16) if ready else b""
        if not part:
            break
        raw += part
    if hung:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    said = [json.loads(line) for line in raw.splitlines()]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a child of this tool failed at {said[-1] if said else numbers[0]}")
    done = [line for line in said if len(line) == 5]
    if os.WIFSIGNALED(status) and said:
        message = f"longer than {limit:.0f} s" if hung else f"signal {os.WTERMSIG(status)}"
        done.append([*said[-1][:3], "hung" if hung else "crashed", message])
    return done, said[-1][0] if said else numbers[0]
