"""Diagnosis: this environment, and maybe a model, go in; what runs fast, falls back or breaks out.

Open doctor.py first. `report.py` has what comes out; the other files each fill a part of it:

    versions.py      installed packages against those that were tested
    devices.py       GPUs that are here, or one by its name, and what multiplies there
    layers.py        which backend computes each kind of expert layer, and why, and what that costs
    combinations.py  versions and devices that are known not to work together, with what to do
"""
