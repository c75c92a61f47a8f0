"""The exceptions that this package raises on purpose, one small tree.

    MoeQloraError                    everything below; catch this to catch all
    +-- ConfigError                  the caller's quantization or LoRA settings cannot be followed
    |                                (also a ValueError)
    +-- DetectionError               the model holds no expert tensors, or none that could be packed
    |                                (also a ValueError)
    +-- QuantizationError            a weight cannot be packed or unpacked (also a RuntimeError)
    |   +-- UnsupportedWeightError   meta, sharded, integer or already packed elsewhere
    |   |                            (fp8, mxfp4, ...)
    |   +-- NonFiniteWeightError     NaN or inf in a weight
    +-- AdapterError                 LoRA on packed experts cannot be created, connected or merged
    |                                (also a RuntimeError)
    +-- CheckpointError              a checkpoint, configuration or registry file is missing,
                                     damaged or foreign (also a ValueError)

Every message is one sentence for a person: what failed, the full name of the parameter or setting,
what was seen, what was expected and what to do.
"""

from __future__ import annotations


class MoeQloraError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(MoeQloraError, ValueError):
    """The caller's quantization or LoRA settings cannot be followed."""


class DetectionError(MoeQloraError, ValueError):
    """The model holds no expert tensors, or none that could be packed."""


class QuantizationError(MoeQloraError, RuntimeError):
    """A weight cannot be packed or unpacked."""


class UnsupportedWeightError(QuantizationError):
    """The weight's storage cannot be packed: meta, sharded, integer or packed by others."""


class NonFiniteWeightError(QuantizationError):
    """The weight holds NaN or inf."""


class AdapterError(MoeQloraError, RuntimeError):
    """LoRA on packed experts cannot be created, connected or merged."""


class CheckpointError(MoeQloraError, ValueError):
    """A checkpoint, configuration or registry file is missing, damaged or of a foreign format."""
