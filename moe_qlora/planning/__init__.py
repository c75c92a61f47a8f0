"""What a model takes, packed, in loading and in training: `moe_qlora.plan` and `moe-qlora plan`.

In goes a model, a configuration or a name, with training settings and sizes of devices; out comes a
`MemoryPlan`, without loading anything. Open `plan.py` first. The order of calls:

    plan.py        checks the settings, asks for the rest
    planner.py     the meta model -> what a step does -> peaks on devices
    meta_model.py  what the user gave -> a function that builds the model on meta; packs and adapts
                   it, and counts what it holds (`blocks.py`); of layers that are alike but for
                   their place, two of a kind are packed and run
    meta_step.py   runs one training step on meta, and counts allocations at the borders of blocks
                   (`tracker.py`): experts and packed Linear layers run by their own operators, and
                   attention as a fused kernel
    attention.py   says where attention is eager and need not be, and lets all kinds run on meta
    choice.py      decides which layers keep what between forward and backward (`levels.py`)
    budget.py      adds up what blocks hold and do, and optimizer states, shares them among ranks,
                   and spreads blocks over devices (`devices.py`)
    search.py      the largest sizes by lines through steps; asks choice.py for the devices of a
                   plan; tries settings in their order, and takes the first that fit
    report.py      `MemoryPlan` and `Best`, which `plan` returns

budget.py, choice.py, devices.py and report.py are plain arithmetic without torch.
"""
