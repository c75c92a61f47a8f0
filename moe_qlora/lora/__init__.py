"""LoRA on packed experts through PEFT: from a model and a LoraConfig to a `PeftModel`.

Open model.py first: the docstring of `get_peft_model` draws the whole path. LoRA goes to Linear
layers through `target_modules` ("all-linear": no experts, no routers), to experts only through
`target_parameters` or `experts=True`. The caller's config is never changed.

    model.py        get_peft_model, load_adapter, and the class of the PEFT model
    config.py       adapt_lora_config: the config that PEFT gets, and its file
    targets.py      modules and parameters that a config means; refusals and notes
    layer.py        the wrapper of one expert parameter, and PEFT's layers over Linear layers
    inject.py       one line on packed weights and LoRA as training starts
    files.py        save_pretrained and load_adapter of the PEFT model, on one rank or many
    stock_calls.py  PEFT's and transformers' own calls on a packed model
    packed_rows.py  several conversations in one row, kept apart or refused
"""
