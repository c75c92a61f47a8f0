"""The experts forward: an experts module of transformers, computed from its packed weights.

In goes a module whose parameters `packing` has packed, with hidden states and top-k assignments;
out comes the layer's output, with gradients for activations, routing weights and LoRA. Open
`forward.py` first: its docstring draws the path of a call, in this order.

    forward.py      `activate`, and the forward that transformers then calls; `dequantize`
    backend.py      `choose_backend`: what computes a call, and why; which gate a module computes
    operands.py     packed weights as eager calls and compiled graphs take them; LoRA factors
    fused.py        a whole module as one operation, by kernels/moe_layer.py
    projection.py   one projection as one operation, by kernels/projection.py; second derivatives
                    are refused
    operators.py    both as custom operators, for torch.compile
    rebinding.py    which forward runs where other code, such as Liger, has bound one
    checks.py       checks before a packed model runs
    use.py          `expert_use`: which experts a user's data goes to
"""
