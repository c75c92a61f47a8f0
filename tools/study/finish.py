"""The losses of single tokens, in ten groups by how rarely the tokens' experts are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .records import append, where

GROUPS = 10


def finish(work: Path, out: Path) -> None:
    """Write tokens.csv: for each codec and seed, before and after training, ten groups' losses.

    Beside each group's loss stands that of the bf16 model of the same seed on the same tokens.
    """
    for rarity_file in sorted(work.glob("rarity-*.npy")):
        seed = rarity_file.stem.removeprefix("rarity-")
        rarity = np.load(rarity_file)[:, :-1]  # a token's loss comes from the position before it
        groups = _groups(rarity)
        for state in ("before", "after"):
            exact_file = work / f"tokens-{seed}-bf16-{state}.npy"
            if not exact_file.exists():
                continue
            exact = np.load(exact_file)
            for file in sorted(work.glob(f"tokens-{seed}-*-{state}.npy")):
                codec = file.stem.removeprefix(f"tokens-{seed}-").removesuffix(f"-{state}")
                losses = np.load(file)
                append(out / "tokens.csv", _rows(seed, codec, state, groups, rarity, losses, exact))


def _groups(rarity: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the tenth that each token is in, from 0 for those whose experts are used most."""
    order = rarity.ravel().argsort(kind="stable").argsort(kind="stable")
    return (order * GROUPS // rarity.size).reshape(rarity.shape)


def _rows(
    seed: str, codec: str, state: str, groups: Any, rarity: Any, losses: Any, exact: Any
) -> list[dict[str, Any]]:
    rows = []
    for group in range(GROUPS):
        chosen = groups == group
        row = {"seed": seed, "codec": codec, "state": state, "group": group}
        row |= {"tokens": int(chosen.sum()), "rarity": float(rarity[chosen].mean())}
        row |= {"loss": float(losses[chosen].mean()), "bf16_loss": float(exact[chosen].mean())}
        rows.append(row | where())
    return rows
