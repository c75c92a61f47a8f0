"""Diagnosis: this environment, and maybe a model, go in; what runs fast, falls back or breaks out.

Open doctor.py first:

    doctor.py   which backend computes each kind of expert layer, why, and what that costs; versions
                and devices that are known not to work together, with what to do
    report.py   the result: installed packages against the tested ones; GPUs here, or one by name
"""
