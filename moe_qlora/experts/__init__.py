"""The experts forward: an experts module of transformers, computed from its packed weights.

Input: a module whose parameters `packing` has packed, hidden states and top-k assignments. Output:
the layer's output, with gradients for activations, routing weights and LoRA. Open `forward.py`
first: its docstring draws the path of a call, in this order.

    forward.py      `activate`, and the forward that transformers then calls; `dequantize`
    backend.py      `choose_backend`: which backend computes a call, and why; the module's gate
    operands.py     packed weights as operands of eager calls and compiled graphs; LoRA factors
    fused.py        a whole module as one operation, by kernels/moe_layer.py, eager and compiled
    projection.py   projection by projection in plain autograd, for all other calls
    forward_override.py
                    which forward runs where other code, such as Liger, has replaced it
    checks.py       checks before a packed model runs
"""
