"""Find expert parameters: an `nn.Module` goes in, a `ModelLayout` (layout.py) comes out.

Open detect.py first, which also finds experts that are lists of Linear modules; `detect` calls the
rest in this order:

    tree.py         show the model as a tree of modules and tensors, packed ones as they decode
    rules.py        classify every candidate, with the words for why; it calls
      groups.py       group the candidates that belong together, each group under its router
      routers.py      find what could choose among E experts
      shapes.py       decide whether matrices chain as gate, up and down do
      dry_run.py      run a copy of the group's block whose big weights allocate nothing
      trace.py        watch that run: which weights are contracted, what is ranked
      orientation.py  tell role and orientation of an accepted parameter

Structure decides alone: names, classes and model types appear in messages only.
"""
