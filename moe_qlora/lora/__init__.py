"""LoRA on packed experts through PEFT: from a model and a LoraConfig to a `PeftModel`.

Open model.py first: the docstring of `get_peft_model` draws the whole path. LoRA goes to Linear
layers through `target_modules` ("all-linear" means just that: no experts, no routers), and to
experts only through `target_parameters` that the caller names, or with `experts=True`. The caller's
config is never changed.

    model.py        get_peft_model, load_adapter, and the class of the PEFT model
    config.py       adapt_lora_config: the config that PEFT gets, and its file
    targets.py      which modules and parameters a config means; what is refused, and what is said
    inject.py       puts the wrappers into the model, and says what got LoRA
    layer.py        the wrapper: one expert parameter and its adapters, merged and unmerged
    linear.py       PEFT's layers over Linear layers: merged exactly, or with a weight that is read
    files.py        save_pretrained and load_adapter of the PEFT model, on one rank or many
    stock_calls.py  PEFT's and transformers' own calls on a packed model
    packed_rows.py  several conversations in one row, kept apart or refused
"""
