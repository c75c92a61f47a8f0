"""Speed: a model that trains goes in; the same model, with less waiting in its steps, comes out.

layers.py       the one owner of a decoder layer's forward: level, compiled, recorded
fit.py          what decoder layers keep for backward in so much memory; open it first
flat_rows.py    batches as one row of real tokens; segments.py: its attention
graphs.py       decoder layers as CUDA graphs: recording.py, lent.py, passes.py
offload.py      packed experts in host memory; slots.py: where they are copied to ahead of use
joined_lora.py  LoRA layers with the same input, as one product
early_loss.py   a loss that Trainer reads while the GPU computes; module_walks.py: its walks
"""
