"""Find expert parameters: an `nn.Module` goes in, a `ModelLayout` (layout.py) comes out.

Open detect.py first, which also finds experts that are lists of Linear modules; `detect` calls the
rest in this order:

    tree.py         show the model as a tree of modules and tensors, packed ones as they decode
    rules.py        classify every candidate, with the words for why; it calls
      structure.py    group candidates under what could choose among E experts; decide by sizes
                      whether matrices chain as gate, up and down do; tell role and orientation
      dry_run.py      run a copy of the group's block whose big weights allocate nothing
      trace.py        watch that run: which weights are contracted, what is ranked

weight_reads.py is apart: Linear layers whose weight other code reads, by the code's source.

Structure decides alone: names, classes and model types appear in messages only.
"""
