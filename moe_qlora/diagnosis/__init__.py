"""Diagnosis: this environment, and maybe a model, go in; what runs fast, falls back or breaks out.

Open doctor.py first. `report.py` has what comes out, and the other file fills a part of it:

    report.py        installed packages against those that were tested; GPUs that are here, or one
                     by its name
    combinations.py  which backend computes each kind of expert layer, why, and what that costs;
                     versions and devices that are known not to work together, with what to do
"""
