"""What a model takes, packed, in loading and in training: `moe_qlora.plan` and `moe-qlora plan`.

In goes a model, a configuration or a name, with training settings and sizes of devices; out comes a
`MemoryPlan`, without loading anything:

    plan.py       checks the settings, asks for the rest, and tries other settings in their order
    planner.py    the meta model -> what a step does -> peaks on devices
    model.py      what the user gave -> the model on meta, packed and adapted, and its blocks
    step.py       runs one training step, and counts allocations at the borders of blocks
    attention.py  says where attention is eager and need not be, and lets all kinds run on meta
    budget.py     adds up what blocks hold and do, and spreads them over devices (`devices.py`)
    choice.py     decides which layers keep what between forward and backward (`levels.py`)
    report.py     `MemoryPlan`, which `plan` returns
"""
