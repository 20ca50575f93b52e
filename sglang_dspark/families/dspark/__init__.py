"""DSpark: parallel backbone, sequential head and confidence (paper, 3.1).

Its config, module and checkpoints are in `drafter/`, which a server uses too.
"""

from sglang_dspark.drafter.checkpoint import load_drafter, save_drafter
from sglang_dspark.drafter.config import DENSE_ARCHITECTURES, DrafterConfig, require_computed
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.families.dspark import learner, moe_learner
from sglang_dspark.families.dspark.initial import drafter_config
from sglang_dspark.families.dspark.proposer import DSparkProposer
from sglang_dspark.families.dspark.shape import DSparkShape, MoEShape
from sglang_dspark.families.family import Family, Recipe

FAMILY = Family(
    name="dspark",
    architectures=DENSE_ARCHITECTURES,
    mark="DSpark",
    config=DrafterConfig,
    model=DSparkDrafter,
    load=load_drafter,
    save=save_drafter,
    proposer=DSparkProposer,
    recipes=(
        Recipe("dspark", DSparkShape, learner.build, drafter_config),
        Recipe("moe", MoEShape, moe_learner.build, drafter_config),
    ),
    check=require_computed,
)
