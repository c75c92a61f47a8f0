"""LoRA on packed experts through PEFT: from a model and a LoraConfig to a `PeftModel`.

Open model.py first: the docstring of `get_peft_model` draws the whole path. LoRA goes to Linear
layers through `target_modules` ("all-linear" means just that: no experts, no routers), and to
experts only through `target_parameters` that the caller names, or with `experts=True`. The caller's
config is never changed.

    model.py        get_peft_model, connect_adapters, and the class of the PEFT model
    config.py       adapt_lora_config: the config that PEFT gets, and its file
    targets.py      resolve_targets: the fields for PEFT; exclude_modules, target_parameters; a
                    warning of experts in target_modules, where PEFT finds none; settings that
                    packed experts do not support are refused
    unfit.py        Linear layers that PEFT's LoRA cannot serve, or only where they are called
    names.py        which parameters are packed, how PEFT matches names, and how it rewrites those
                    of transformers v4
    inject.py       puts the wrappers into the model, and logs what got LoRA
    layer.py        the wrapper: one expert parameter and its adapters, merged and unmerged; LoRA
                    on some experts of a weight
    merging.py      PEFT's layers over packed Linear layers, merged exactly; weighted sums of
                    adapters
    load.py         load_adapter, for saved adapters
    files.py        save_pretrained and load_adapter of the PEFT model, on one rank or many; checks
                    of adapter folders
    stock_calls.py  PEFT's and transformers' own calls on a packed model
"""
