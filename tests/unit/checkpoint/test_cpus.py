"""The count of usable CPUs, with affinity and cgroups made up."""

from __future__ import annotations

import os

import pytest

from moe_qlora.checkpoint.cpus import usable_cpus

V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
V1 = (
    "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
)
HYBRID = V1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that counts the CPUs of a made-up machine, by default one of 64 CPUs."""

    def count(
        groups: str = "", mounts: str = "", files: dict[str, str] | None = None, affinity: int = 64
    ) -> int:
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
        every = {"proc/self/cgroup": groups, "proc/self/mounts": mounts, **(files or {})}
        for name, text in every.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return usable_cpus(tmp_path)

    return count


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [
        ("max 100000", 64),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1000 100000", 1),
        ("9900000 100000", 64),
        ("", 64),
        ("two 100000", 64),
        ("200000 0", 64),
    ],
)
def test_quota_of_version_2(machine, limit, cpus):
    assert machine("0::/\n", V2, {"sys/fs/cgroup/cpu.max": f"{limit}\n"}) == cpus


def test_the_least_quota_above_counts(machine):
    files = {
        "sys/fs/cgroup/a.slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/a.slice/b.scope/cpu.max": "max 100000\n",
        "sys/fs/cgroup/other.slice/cpu.max": "100000 100000\n",
    }
    assert machine("0::/a.slice/b.scope\n", V2, files) == 3
    files["sys/fs/cgroup/a.slice/b.scope/cpu.max"] = "200000 100000\n"
    assert machine("0::/a.slice/b.scope\n", V2, files) == 2


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("-1", "100000", 64), ("400000", "100000", 4), ("75000", "50000", 1), ("", "", 64)],
)
def test_quota_of_version_1(machine, quota, period, cpus):
    # Docker without a cgroup namespace: the path is the host's, the mount the container's own
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": f"{period}\n",
        "sys/fs/cgroup/memory/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/memory/cpu.cfs_period_us": "100000\n",
    }
    groups = "7:memory:/docker/0a1b\n4:cpuacct,cpu:/docker/0a1b\n"
    assert machine(groups, V1, files) == cpus


def test_both_versions_at_once(machine):
    files = {
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    assert machine("4:cpu,cpuacct:/job\n0::/\n", HYBRID, files) == 3


def test_affinity(machine):
    assert machine(affinity=3) == 3
    files = {"sys/fs/cgroup/cpu.max": "800000 100000\n"}
    assert machine("0::/\n", V2, files, affinity=3) == 3
    assert machine("0::/\n", V2, files, affinity=16) == 8


def test_damaged_files_set_no_limit(machine):
    assert machine("what\n::\n0::/\n", "no mount\n" + V2) == 64


def test_a_system_without_either(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path) == 1
