"""The public names and their modules: `__init__.py` imports each on its first use."""

from .checkpoint.merge import merge_adapter as merge_adapter
from .checkpoint.save import quantize_checkpoint as quantize_checkpoint
from .detection.detect import detect as detect
from .diagnosis.doctor import Diagnosis as Diagnosis
from .diagnosis.doctor import doctor as doctor
from .distributed.gather import full_state_dict as full_state_dict
from .distributed.load_sharded import load_sharded as load_sharded
from .distributed.sharding import prepare_sharding as prepare_sharding
from .errors import AdapterError as AdapterError
from .errors import CheckpointError as CheckpointError
from .errors import ConfigError as ConfigError
from .errors import DetectionError as DetectionError
from .errors import MoeQloraError as MoeQloraError
from .errors import NonFiniteWeightError as NonFiniteWeightError
from .errors import QuantizationError as QuantizationError
from .errors import UnsupportedWeightError as UnsupportedWeightError
from .hf.switch import disable as disable
from .hf.switch import enable as enable
from .hf.switch import enabled as enabled
from .kernels.workspace import set_workspace_cap as set_workspace_cap
from .layout import ExpertParam as ExpertParam
from .layout import ModelLayout as ModelLayout
from .lora.config import adapt_lora_config as adapt_lora_config
from .lora.model import connect_adapters as connect_adapters
from .lora.model import get_peft_model as get_peft_model
from .lora.model import load_adapter as load_adapter
from .lora.targets import exclude_modules as exclude_modules
from .lora.targets import target_parameters as target_parameters
from .planning.plan import plan as plan
from .planning.report import MemoryPlan as MemoryPlan
from .quantize import QuantizationReport as QuantizationReport
from .quantize import quantize_experts as quantize_experts
from .report.write import write_report as write_report
from .serving.export import export_adapter as export_adapter
from .train.fit import Fit as Fit
from .train.fit import fit_memory as fit_memory
from .train.offload import Offload as Offload
from .train.offload import offload_experts as offload_experts
from .train.prepare import PreparedTraining as PreparedTraining
from .train.prepare import prepare_training as prepare_training

__version__: str
