"""The command line, copies of the running process that a test may kill, Triton's interpreter."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from tqdm.std import tqdm


class Copy:
    """A copy of this process, by fork, that does `work`, says nothing, and ends.

    It ends with status 0, or 1 where `work` raised. It shares no lock with its original: tqdm's is
    a semaphore between processes, which one killed while it draws would keep for ever (1 of 125
    saves killed at random moments did, and the next progress bar here waited for it).
    """

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            lock, classes = threading.RLock(), [tqdm]
            for cls in classes:
                cls.set_lock(lock)
                classes += cls.__subclasses__()
            work()
            status = 0
        finally:
            os._exit(status)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def ended(self, seconds: float = 60) -> int:
        """How it ended: its status, or the signal's number below zero."""
        limit = time.monotonic() + seconds
        while self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise AssertionError(f"a copy of the process is stuck, for {seconds} seconds")
            else:
                time.sleep(0.002)
        return self._status


@pytest.fixture
def copied() -> Iterator[Callable[[Callable[[], object]], Copy]]:
    """A function that makes a `Copy`; those still there at the end are killed."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    copies: list[Copy] = []

    def make(work: Callable[[], object]) -> Copy:
        copies.append(Copy(work))
        return copies[-1]

    # A copy has one thread only, and would wait for ever for what torch's others should do.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)
    for copy in copies:
        copy.kill()
        copy.ended()


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `moe-qlora ARGUMENTS`: exit code, stdout, stderr."""
    from moe_qlora.cli.app import run

    monkeypatch.delenv("COLUMNS", raising=False)  # of the shell, or of a library

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moe-qlora", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in Triton's interpreter, over a scratch of their own.

    Triton's interpreter takes int() of arrays of one element, which NumPy 2.4 refuses.
    """
    import numpy as np
    from quick_interpreter import quicken
    from triton.runtime import interpreter

    from moe_qlora.kernels import workspace

    original = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        original(tensor, *scope)  # since Triton 3.6 with a scope, which takes the patches back
        set_attribute = scope[0].set_attr if scope else setattr
        first = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        set_attribute(tensor, "__index__", first)

    def splat(self, block, scalar):
        # Triton gives a comparison's result its operands' dtype here, which 3.9 takes for no mask.
        data = np.full(block.shape, scalar.data, dtype=interpreter._get_np_dtype(block))
        return interpreter.TensorHandle(data, block.scalar)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(type(interpreter.interpreter_builder), "create_splat", splat)
    quicken(monkeypatch)
    workspace.release_workspace()
    yield
    workspace.release_workspace()
