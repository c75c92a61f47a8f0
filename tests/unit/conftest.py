"""The command line, and Triton's interpreter."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def cli(monkeypatch, capsys):
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
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("a GPU is there, and with it the compiled kernels")
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
