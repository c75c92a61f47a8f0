"""Loads of folders whose experts' own codes are kept: nothing is dequantized and packed anew.

Kept is what packing/mxfp4.py can compute with: MXFP4 as gpt-oss has it, `N_blocks` and `N_scales`
for the whole of a fused parameter N. Experts that the folder holds in another form are dequantized
and packed as those of any other folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from ..checkpoint.integrity import canonical_name
from ..checkpoint.load_spec import LoadSpec
from ..checkpoint.prequantized import PrequantizedCheckpoint
from ..checkpoint.prequantized.config import MXFP4
from ..checkpoint.prequantized.decode import CODES, SCALE
from ..errors import CheckpointError, UnsupportedWeightError
from ..kernels.weights import MX_BLOCK
from ..layout import ExpertParam
from ..packing.mxfp4 import KeptPacker, kept_settings
from ..packing.settings import CodecSettings

# Least size of a slice of a fused tensor: an expert, or as many small ones as fit in this.
SLICE_BYTES = 8 << 20


def weights_to_keep(model: Any, spec: LoadSpec) -> dict[str, CodecSettings]:
    """Return how the expert weights of a load are packed whose codes can be kept, by name."""
    files, kept = spec.prequantized, {}
    if files is not None and files.method == MXFP4:
        settings = kept_settings(spec.settings)
        keys = {name: canonical_name(model, name, files) for name in spec.params}
        kept = {
            name: settings
            for name, key in keys.items()
            if key is not None and _is_whole(files, key, spec.params[name])
        }
    if not kept:
        warnings.warn(
            "keep_codes=True: the checkpoint holds no experts in MXFP4 as gpt-oss has it, so that "
            f"all experts are packed to {spec.settings.kind}.",
            UserWarning,
            stacklevel=2,
        )
    return kept


def _is_whole(files: PrequantizedCheckpoint, key: str, param: ExpertParam) -> bool:
    if files.parts(key).keys() != {CODES, SCALE}:
        return False
    blocks = files.stored[files.parts(key)[CODES]].shape
    if len(blocks) != 4 or blocks[3] != MX_BLOCK // 2:
        return False
    experts, rows, groups, _ = blocks
    return (experts, groups * MX_BLOCK, rows) == tuple(param.shape)


def refuse_to_shard(kept: Collection[str], advice: str) -> None:
    """Raise where a load that gives each rank its share at once meets weights with own codes."""
    if kept:
        raise CheckpointError(
            f"{min(kept)} keeps the MXFP4 codes of its checkpoint, which are not sharded while "
            f"they are read: {advice}, or load the checkpoint without keep_codes=True."
        )


def keep_codes(name: str, key: str, spec: LoadSpec) -> nn.Parameter:
    """Read one weight's codes, some experts at a time; return the parameter that holds them.

    Args:
        name: Of the parameter.
        key: Plain key in the files.
        spec: Of the load, which gets the packed weight.

    Raises:
        CheckpointError: Codes or scales are not of this weight, or a scale is NaN.
    """
    files = spec.prequantized
    assert files is not None
    parts, device = files.parts(key), spec.device(name)
    rows = spec.shape(name)[0]
    try:
        packer = KeptPacker(spec.shape(name), spec.dtypes[name], device, spec.settings_of(name))
        info = files.stored[parts[CODES]]
        step = max(SLICE_BYTES * info.shape[0] // max(info.nbytes, 1), 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            blocks, scales = (
                files.read_stored(parts[role], start, stop, device) for role in (CODES, SCALE)
            )
            packer.add(blocks, scales)
        packed = packer.finish()
    except UnsupportedWeightError as error:
        raise CheckpointError(f"{name}: {error} Copy the files again.") from error
    return spec.keep(name, packed)
