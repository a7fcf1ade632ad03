"""What a recipe may say, and the loading, checking and printing of recipes."""

from megatron_gspo.config.effective import effective_yaml
from megatron_gspo.config.formula import objective_formula
from megatron_gspo.config.load import load_recipe
from megatron_gspo.config.objectives import (
    OBJECTIVES,
    AdvantageConfig,
    Estimator,
    GspoConfig,
    ObjectiveConfig,
    OnRatio,
    SftConfig,
)
from megatron_gspo.config.problem import Problem, RecipeError, suggest
from megatron_gspo.config.resume import check_resume
from megatron_gspo.config.schema import (
    BatchConfig,
    DataConfig,
    Dtype,
    Engine,
    LayoutConfig,
    ObserveConfig,
    OnNonFinite,
    OnRewardError,
    OptimizerSection,
    PolicyConfig,
    Recipe,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Schedule,
    ServerConfig,
    SyncConfig,
    Transport,
    WandbConfig,
)
from megatron_gspo.config.validate import validate

__all__ = [
    "OBJECTIVES",
    "AdvantageConfig",
    "BatchConfig",
    "DataConfig",
    "Dtype",
    "Engine",
    "Estimator",
    "GspoConfig",
    "LayoutConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "OnNonFinite",
    "OnRatio",
    "OnRewardError",
    "OptimizerSection",
    "PolicyConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Schedule",
    "ServerConfig",
    "SftConfig",
    "SyncConfig",
    "Transport",
    "WandbConfig",
    "check_resume",
    "effective_yaml",
    "load_recipe",
    "objective_formula",
    "suggest",
    "validate",
]
