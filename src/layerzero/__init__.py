"""layerzero: hierarchical ZeRO and the rest of its family for PyTorch, as one engine.

    model = lz.shard(build_model(), lz.LayerZeROConfig.from_yaml("config.yml"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

See `shard`. ``docs/design.md`` has the vocabulary.
"""

from layerzero.arguments import add_arguments, config_from_args
from layerzero.config import LayerZeROConfig
from layerzero.errors import ConfigError, DesyncError, LayerZeroError, ShardingError
from layerzero.group import ParamInfo
from layerzero.layout import TensorParallel
from layerzero.module import ShardedModule, forward_method, full_state_dict
from layerzero.optimizers import register_elementwise_optimizer
from layerzero.parallel.pipeline import Pipeline
from layerzero.parallel.stage import StageNames
from layerzero.report import compare_strategies, memory_report, traffic_report
from layerzero.shard import shard
from layerzero.sharding import Sharding
from layerzero.state import param_info
from layerzero.warnings_ import LayerZeROWarning

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DesyncError",
    "LayerZeROConfig",
    "LayerZeROWarning",
    "LayerZeroError",
    "ParamInfo",
    "Pipeline",
    "ShardedModule",
    "Sharding",
    "ShardingError",
    "StageNames",
    "TensorParallel",
    "add_arguments",
    "compare_strategies",
    "config_from_args",
    "forward_method",
    "full_state_dict",
    "memory_report",
    "param_info",
    "register_elementwise_optimizer",
    "shard",
    "traffic_report",
]
