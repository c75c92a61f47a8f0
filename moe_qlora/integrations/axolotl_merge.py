"""What follows `axolotl merge-lora`: the same folder, with weights merged by this package.

axolotl's own merge knows only experts that axolotl has packed. Where a checkpoint keeps experts one
by one and the adapter has them fused, it says "MERGE INCOMPLETE" and goes on; and it rounds only
Linear layers as in training. So the weights, their index and the configuration are written again
from the base; tokenizer and templates stay as axolotl wrote them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoeQloraError
from .host import ExpertsHost

if TYPE_CHECKING:
    from ..checkpoint.merge import MergeReport

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def replace_merged(
    host: ExpertsHost, cfg: Mapping[str, Any], adapter: str, out: str
) -> MergeReport:
    """Merge again, and replace the weights that axolotl has written to `out` by the result.

    `out` stays as it is until the new weights are complete; an error says that it is not to be
    used.
    """
    target = Path(out)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".moe_qlora-") as temporary:
        fresh = Path(temporary) / "merged"
        try:
            report = host.merge(_base_folder(cfg), adapter, fresh)
        except MoeQloraError as error:
            raise type(error)(
                f"{out} was written by axolotl, whose merge does not know of packed experts, and "
                f"is not to be used; merging anew failed ({error}): run moe-qlora merge "
                f"{cfg['base_model']} {adapter} OUT."
            ) from error
        for pattern in _WEIGHTS:
            for old in target.glob(pattern):
                old.unlink()
        for pattern in (*_WEIGHTS, "config.json"):
            for new in fresh.glob(pattern):
                shutil.move(new, target / new.name)
    return replace(report, folder=target)


def _base_folder(cfg: Mapping[str, Any]) -> Path:
    """Return the checkpoint's folder; for a hub id the one in the cache."""
    folder = Path(str(cfg["base_model"])).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(cfg["base_model"], revision=cfg.get("revision_of_model")))
