"""Speed: a model that trains goes in; the same model, with less waiting in its steps, comes out.

fit.py          what decoder layers keep for backward in so much memory; open it first
fitted.py       the forward of a layer that keeps what was chosen, without gradient checkpointing
hosted.py       the experts that fit_memory brings from host memory to the device
first_steps.py  what it planned against the first steps
joined_lora.py  LoRA layers with the same input, as one product
graphs.py       decoder layers as CUDA graphs, for training
recording.py    one call of a layer in training as graphs, and their replay
lent.py         what graphs return, lent instead of copied
passes.py       when graphs may run, so that nothing that is kept is overwritten
offload.py      packed experts in host memory
slots.py        memory on the device that they are copied to ahead of use
call_kinds.py   which calls graphs can replay, and experts that stay where these read them
gathered.py     router logits as outputs of graphs
"""
