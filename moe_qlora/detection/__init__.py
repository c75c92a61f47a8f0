"""How expert tensors are found: by shapes, by their router, and by what the forward does.

    tensors.py    the model as a tree of modules and tensors, packed ones seen as what they decode
    to shapes.py     do these matrices chain as one expert's projections do, and which way round are
    they routers.py    what could choose among E experts, and which stacks stand under it
    banks.py      which stacks belong together
    shadow.py     a copy of one block whose big weights allocate nothing, and inputs to run it on
    trace.py      the dispatch mode that watches such a run: what is contracted, what is chosen
    linear.py     experts that are lists of Linear modules
    judge.py      the verdict on each candidate, and the words for it
    walk.py       all of it, in order -> ModelLayout

No name, class or model type takes part in a decision; names appear in messages only.
"""
