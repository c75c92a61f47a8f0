"""Count the CPUs that this process may use: by its affinity, and by the quota of its cgroups.

`os.cpu_count` counts those of the host. In a container that may use two of 64, as many threads as
that wait for each other, and the kernel stops all of them once the quota of a period is used up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def usable_cpus(root: Path = ROOT) -> int:
    """Return how many threads of this process can run at the same time, at least 1.

    A quota of 2.5 CPUs counts as 2. `root` is the folder that holds `proc` and the cgroups' file
    systems. Where the system has no affinity, or no cgroups, that part sets no limit.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, int(min([count, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in CPUs, of each cgroup that this process is in and of those above it.

    Formats: cgroups(7), "/proc/pid/cgroup"; cpu.max of version 2, cpu.cfs_* of version 1.
    """
    memberships = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    mounts = [line.split(" ") for line in _lines(root / "proc/self/mounts")]
    for _, controllers, path in (entry for entry in memberships if len(entry) == 3):
        for mount in (entry for entry in mounts if len(entry) >= 4):
            if not controllers and mount[2] == "cgroup2":
                read = _quota_of_version_2
            elif "cpu" in controllers.split(",") and "cpu" in mount[3].split(","):
                read = _quota_of_version_1
            else:
                continue
            top = root / mount[1].lstrip("/")
            # In a container, `path` may be the host's, and `top` be the container's own cgroup.
            for place in (PurePosixPath(path), *PurePosixPath(path).parents):
                quota = read(top / str(place).lstrip("/"))
                if quota is not None:
                    yield quota


def _quota_of_version_2(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _ratio(quota, period)  # "max 100000" where there is no limit


def _quota_of_version_1(group: Path) -> float | None:
    return _ratio(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return CPUs, None where there is no limit: "max" or -1."""
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _text(file: Path) -> str:
    """Return what a file says, nothing where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
