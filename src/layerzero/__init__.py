"""layerzero: hierarchical ZeRO and the rest of its family for PyTorch, as one engine.

    model = lz.shard(build_model(), lz.LayerZeROConfig.from_yaml("config.yml"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

See `shard`. ``docs/design.md`` has the vocabulary.
"""

from layerzero._version import __version__
from layerzero.arguments import add_arguments, config_from_args
from layerzero.checkpoint import Loaded, Saved, latest_step, load, resume, rng_state, save, set_rng_state
from layerzero.config import LayerZeROConfig
from layerzero.errors import CheckpointError, ConfigError, DesyncError, LayerZeroError, ShardingError
from layerzero.group import ParamInfo
from layerzero.layout import TensorParallel
from layerzero.module import ShardedModule, forward_method, full_state_dict
from layerzero.optimizers import register_elementwise_optimizer
from layerzero.parallel.mesh import ParallelMesh
from layerzero.parallel.pipeline import Pipeline
from layerzero.parallel.stage import StageNames
from layerzero.report import compare_strategies, memory_report, traffic_report
from layerzero.shard import shard
from layerzero.sharding import Sharding
from layerzero.state import param_info
from layerzero.warnings_ import LayerZeROWarning

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DesyncError",
    "LayerZeROConfig",
    "LayerZeROWarning",
    "LayerZeroError",
    "Loaded",
    "ParallelMesh",
    "ParamInfo",
    "Pipeline",
    "Saved",
    "ShardedModule",
    "Sharding",
    "ShardingError",
    "StageNames",
    "TensorParallel",
    "__version__",
    "add_arguments",
    "compare_strategies",
    "config_from_args",
    "forward_method",
    "full_state_dict",
    "latest_step",
    "load",
    "memory_report",
    "param_info",
    "register_elementwise_optimizer",
    "resume",
    "rng_state",
    "save",
    "set_rng_state",
    "shard",
    "traffic_report",
]
