"""Find expert parameters: an `nn.Module` goes in, a `ModelLayout` (layout.py) comes out.

detect.py calls tree.py, which shows the model as modules and tensors, then rules.py, which asks
structure.py for groups that chain under a router. Names appear in messages only. weight_reads.py is
apart: it finds Linear layers whose weight other code reads.
"""
