"""The public names: there, sorted, documented, and cheap to import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import moe_qlora
from moe_qlora import errors


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_lean():
    heavy = ["torch", "transformers", "peft", "bitsandbytes", "accelerate", "triton", "numpy"]
    code = f"import sys, moe_qlora; print([m for m in {heavy} if m in sys.modules])"
    assert python(code) == "[]"


def test_the_detector_starts_no_accelerator_and_needs_no_transformers():
    code = (
        "import sys, torch, moe_qlora\n"
        "moe_qlora.detect(torch.nn.Linear(2, 2))\n"
        "print(torch.cuda.is_initialized(), 'transformers' in sys.modules)"
    )
    assert python(code) == "False False"


def test_all_is_sorted_and_complete():
    assert list(moe_qlora.__all__) == sorted(moe_qlora.__all__, key=str)
    # One line for each name: the face reads the stub by lines, type checkers read it by its rules.
    lines = Path(moe_qlora.__file__).with_suffix(".pyi").read_text().splitlines()
    imports = [line.split() for line in lines if line.startswith("from")]
    assert sorted(words[3] for words in imports) == moe_qlora.__all__
    assert all(words[2:] == ["import", words[3], "as", words[3]] for words in imports)
    assert set(moe_qlora.__all__) <= set(dir(moe_qlora))


@pytest.mark.parametrize("name", moe_qlora.__all__)
def test_public_name(name):
    value = getattr(moe_qlora, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isclass(value):
        members = {
            key: member
            for key, member in vars(value).items()
            if not key.startswith("_") and (callable(member) or isinstance(member, property))
        }
        for key, member in members.items():
            assert inspect.getdoc(member), f"{name}.{key} has no docstring"
    else:
        for parameter in inspect.signature(value).parameters.values():
            assert parameter.annotation is not parameter.empty, f"{name}: {parameter}"


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moe_qlora.nothing  # noqa: B018


@pytest.mark.parametrize("name", moe_qlora._REMOVED)
def test_a_removed_name_says_what_to_use(name):
    with pytest.raises(AttributeError, match=rf"^moe_qlora.{name} is gone since version 0.3: .+$"):
        getattr(moe_qlora, name)
    assert not hasattr(moe_qlora, name) and name not in dir(moe_qlora)


def test_one_error_tree():
    tree = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert all(issubclass(error, moe_qlora.MoeQloraError) for error in tree)
    assert {error.__name__ for error in tree} <= set(moe_qlora.__all__)
    for error in tree - {moe_qlora.MoeQloraError}:
        assert error.__name__ in errors.__doc__
        assert issubclass(error, ValueError | RuntimeError)
