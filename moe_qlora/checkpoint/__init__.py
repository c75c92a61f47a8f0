"""Checkpoint folders: reading, packing, saving, merging, verifying. Start at FORMAT.md.

What goes in: a 16-bit folder, a packed folder, a packed model or an adapter folder. What comes out:
a packed folder (`save_pretrained`, `quantize_checkpoint`), a merged 16-bit folder
(`merge_adapter`), or a report (`verify`). Files that may be damaged are read by `reader` only.

    reader            safetensors and JSON files, which may be damaged
    staging           writing: safetensors files; folders that appear whole or not at all; one
                      process at a time
    manifest          packed folders: the manifest, named by config.json; the folder against it, its
                      parts against each other and against its model; any folder as a `Checkpoint`
    prequantized      folders that their makers quantized, as the 16-bit folders they stand for
    conversion        tensors on disk <-> a model's parameters, by transformers' own conversions
    rows              what one load packs; the loop that reads rows, converts and packs them
    save              a packed folder: of a packed model, of a 16-bit folder
    adapter           an adapter as deltas to weights
    training_codec    what an adapter was trained on, by its note: codec, the base's fingerprint
    base, merge       the base's weights and files; the merged folder, tied weights, other shapes
    verify            damage in a folder; the error of packing its weights
"""
