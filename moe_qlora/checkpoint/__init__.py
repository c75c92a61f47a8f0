"""Checkpoint folders: read, packed, saved, merged, verified. Start at FORMAT.md.

folder            safetensors and JSON files, which may be damaged; folders that appear whole
manifest          packed folders: the manifest, checksums; any folder as a `Checkpoint`
prequantized      folders that their makers quantized, as the 16-bit folders they stand for
conversion        tensors on disk <-> a model's parameters; the base of a merge
rows              what one load packs; the loop that reads rows, converts and packs them
adapter, merge    an adapter as deltas to weights; the merged folder
training_codec    what an adapter was trained on: codec, fingerprint, model card
save, verify      a packed folder of a model or a 16-bit folder; damage, and packing's error
"""
