"""What a model takes, packed, in loading and in training: `moe_qlora.plan` and `moe-qlora plan`.

In goes a model, a configuration or a name, with training settings and sizes of devices; out comes a
`MemoryPlan`, without loading anything. Open `plan.py` first. The order of calls:

    plan.py        checks the settings, asks for the rest, searches for what fits
    source.py      what the user gave -> a function that builds the model on meta
    planner.py     the meta model -> what a step does -> peaks on devices
    meta_model.py  packs and adapts the model on meta, and counts what it holds (`blocks.py`); of
                   layers that are alike but for their place, two of a kind are packed and run
    meta_step.py   runs one training step on meta, and counts allocations at the borders of blocks:
                   experts run by their own code, whose launches do nothing on meta, as on the card
                   that is planned for; packed Linear layers and attention are fakes (`meta_ops.py`)
    tracker.py     counts the bytes of tensors on meta, and of loops of linear attention without
                   their turns
    attention.py   says where attention is eager and need not be, and lets other kinds run on meta
    choice.py      decides which layers keep what between forward and backward (`levels.py`);
                   `fitting.py` asks it for the devices of a plan
    budget.py      adds up what blocks hold and do, and optimizer states, and spreads blocks over
                   devices (`devices.py`)
    engines.py     what a rank holds under DDP, FSDP2, expert parallelism and ZeRO-3
    scaling.py     how long a step takes on several GPUs, and what was fitted to rows
    advice.py      says which engine to take for several GPUs, by memory and by these steps
    hints.py       tries what to change where it does not fit; and which engine fits
    report.py      `MemoryPlan` and `Hint`, which `plan` returns
    rehearsal.py   bytes by kind, for pages about a model

budget.py, choice.py, devices.py, engines.py, report.py and scaling.py are plain arithmetic without
torch.
"""
