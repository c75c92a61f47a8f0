"""Check the built package: what its files hold, and that it works where only the wheel is.

    python tools/package_check.py contents SDIST WHEEL    in the checkout
    python tools/package_check.py release WHEEL           whether it can be given to a registry
    python -I tools/package_check.py use CHECKOUT         in an environment that has the wheel

`bash tools/package_check` builds both files and calls these.
"""

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any


def expect(true: Any, message: str) -> None:
    if not true:
        sys.exit(f"package_check: {message}")


def contents(sdist: Path, wheel: Path) -> None:
    """Compare both files with what git tracks: code and data, all of it, and nothing else."""
    command = ["git", "ls-files", "moe_qlora", "model_registry"]
    tracked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    pages = ("moe_qlora/docs/", "moe_qlora/README")  # of the repository
    wanted = {name for name in tracked if not name.startswith(pages) and name[-3:] != ".md"}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expect(wanted <= packed, f"{sdist.name} lacks {sorted(wanted - packed)}")
    foreign = {name for name in packed if name.startswith(("tests", "tools", "build", ".ci"))}
    expect(not foreign, f"{sdist.name} holds {sorted(foreign)}")

    installed = {re.sub("^model_registry/", "moe_qlora/model_registry/", name) for name in wanted}
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    lacks, more = sorted(installed - package), sorted(package - installed)
    told = f"{wheel.name} lacks {lacks} and holds {more} beside what git tracks"
    expect(package == installed, told)
    typed = "moe_qlora/py.typed" in package
    expect(typed, f"{wheel.name} lacks py.typed, without which type checkers ignore the package")
    licensed = any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    expect(licensed, f"{wheel.name} lacks the license")
    print(f"{wheel.name}: {len(package)} files, those that git tracks; {sdist.name}: the same")


def release(wheel: Path) -> None:
    """See whether a registry's page would lead somewhere, and whether the changelog is closed."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(archive.read(name))
    urls = [url for url in about.get_all("Project-URL", []) if url.startswith("Repository,")]
    expect(urls, "pyproject.toml has no [project.urls] with a Repository")
    links = re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", str(about.get_payload()))
    told = f"README.md has relative links, which lead nowhere on a registry's page: {links}"
    expect(not links, told)
    lines = Path("CHANGELOG.md").read_text("utf-8").splitlines()
    heading = next(line for line in lines if line[:3] == "## ")
    closed = re.fullmatch(rf"## {re.escape(about['Version'])} \(\d{{4}}-\d\d-\d\d\)", heading)
    told = f"CHANGELOG.md begins with {heading!r}, not with {about['Version']} and a date"
    expect(closed, told)


def use(checkout: Path) -> None:
    """Work with the installed wheel: the command line, packing, training, an adapter's folder."""
    import moe_qlora

    home = Path(str(moe_qlora.__file__)).resolve().parent
    installed = home.is_relative_to(Path(sys.prefix).resolve())
    told = f"moe_qlora was imported from {home}, and not from the wheel in {sys.prefix}"
    expect(installed and not home.is_relative_to(checkout), told)
    version = metadata.version("moe-qlora")
    expect(version == moe_qlora.__version__, f"metadata says {version}, the code another one")
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        run_commands(Path(folder))
    ours = [m for name, m in sys.modules.items() if name.split(".")[0] == "moe_qlora"]
    files = [Path(module.__file__ or next(iter(module.__path__))).resolve() for module in ours]
    foreign = sorted(str(file) for file in files if not file.is_relative_to(home))
    expect(not foreign, f"these modules do not come from the wheel: {foreign}")
    print(f"moe_qlora {version} works from {home}: {len(files)} modules")


def train(folder: Path) -> None:
    """Save a tiny model to `folder`/model, load it packed, train LoRA on it, reload the adapter."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, logging

    import moe_qlora
    from moe_qlora import testing

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tiny: Any = testing.tiny_model("qwen3_moe")
    tiny.save_pretrained(folder / "model")
    bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options: Any = {"quantization_config": bnb_config, "dtype": torch.float32}

    def load() -> Any:
        with moe_qlora.enabled():
            return AutoModelForCausalLM.from_pretrained(folder / "model", **options)

    torch.manual_seed(0)
    lora_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model: Any = moe_qlora.get_peft_model(load(), lora_config, experts=True).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = testing.tiny_inputs(model.get_base_model())["input_ids"]
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expect(losses[-1] < losses[0], f"the loss of the tiny model did not fall: {losses}")
    model.save_pretrained(folder / "adapter")
    moe_qlora.load_adapter(load(), str(folder / "adapter"))


def run_commands(folder: Path) -> None:
    """Run the installed program on the model that `train` saved."""
    from typer.testing import CliRunner

    from moe_qlora.cli.app import app

    program = Path(sys.prefix) / "bin/moe-qlora"
    script = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    model, packed = str(folder / "model"), str(folder / "packed")
    plan = ["plan", model, "--gpus", "1x1GiB", "--seq", "64"]
    commands = [["doctor", model], ["dump", model], plan, ["quantize", model, packed, "--quiet"]]
    commands += [["verify", packed], ["report", model, "-o", f"{folder}/r.html"]]
    for command in commands:
        result = CliRunner().invoke(app, command)
        told = f"moe-qlora {' '.join(command)} ended with {result.exit_code}: {result.output}"
        expect(result.exit_code == 0 and result.output.strip(), told)
    print(f"{script.stdout.strip()}: {', '.join(command[0] for command in commands)}")


if __name__ == "__main__":
    checks: dict[str, Any] = {"contents": contents, "release": release, "use": use}
    checks[sys.argv[1]](*(Path(argument).resolve() for argument in sys.argv[2:]))
