"""LoRA on packed experts through PEFT: in go a model and a LoraConfig, out comes a `PeftModel`.

Open model.py first: the docstring of `get_peft_model` draws the whole path. LoRA goes to Linear
layers through `target_modules` ("all-linear" means just that: no experts, no routers), and to
experts only through `target_parameters` that the caller names, or with `experts=True`. The caller's
config is never changed.

    model.py                 get_peft_model, connect_adapters, and the class of the PEFT model
    config.py                adapt_lora_config: the config that PEFT gets, and what its file says
    targets.py               resolve_targets: what PEFT is told; exclude_modules, target_parameters
    names.py                 which parameters are packed, and how PEFT matches names
    rewrite.py               PEFT's rewrite of names from transformers v4, and how to avoid it
    packed.py                whether experts are packed, before LoRA is made
    left_out.py              experts that target_modules names in vain
    coverage.py              what got LoRA, in one line for the log
    supported.py             what LoRA on packed experts cannot have
    unloaded.py              a packed model on meta, for configs that are needed before the load
    inject.py                how the wrappers get into the model
    layer.py                 the wrapper: one expert parameter and its adapters
    chosen.py                LoRA on some experts of a weight: factors of these alone
    merge.py, combine.py     LoRA merged into packed weights; weighted sums of adapters
    load.py                  load_adapter, for saved adapters
    folder.py                what a saved adapter's folder must hold
    transformers_methods.py  add_adapter and load_adapter of transformers' own models
"""
