"""Many GPUs: a packed model goes in, and each rank keeps its part of it.

Open expert_parallel.py first. Engines are torch.distributed's and transformers' own; what is here
tells them what a packed weight is.

expert_parallel.py  each rank holds some experts of every layer, and tokens travel to them
watch.py            checks that no engine takes a rank's experts for copies of all ranks'
"""
