"""The experts forward: an experts module of transformers, computed from its packed weights.

Open `forward.py` first: its docstring draws the path of a call, in this order.

    forward.py           `activate`, and the forward that transformers then calls; `dequantize`
    backend.py           `choose_backend`: the backend of a call, and why; the module's gate
    operands.py          packed weights as operands of eager calls and graphs; LoRA factors
    fused.py             a whole module as one operation, by kernels/moe_layer.py
    projection.py        projection by projection in plain autograd, for all other calls
    forward_override.py  forwards that other code, such as Liger, has bound
    checks.py            checks before a packed model runs
"""
