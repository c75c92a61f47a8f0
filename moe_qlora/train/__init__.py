"""`prepare_training` and its parts: the same model comes out, with quicker training steps.

layers.py       the one owner of a decoder layer's forward: level, compiled, recorded
prepare.py      sets all parts on one model; open it first. liger.py: Liger's kernels
fit.py          what decoder layers keep for backward in the given memory
flat_rows.py    batches as one row of real tokens; segments.py: its attention
graphs.py       decoder layers as CUDA graphs
offload.py      packed experts in host memory, copied to the device ahead of use
trainer_loop.py what Trainer repeats each step: walks of the module tree, a look for NaN
"""
