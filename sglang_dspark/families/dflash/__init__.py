"""DFlash: DSpark's backbone without a sequential head; SGLang's DFLASH."""

from sglang_dspark.families.dflash import learner
from sglang_dspark.families.dflash.checkpoint import load_dflash, save_dflash
from sglang_dspark.families.dflash.model import ARCHITECTURE, DFlashConfig, DFlashDrafter
from sglang_dspark.families.dflash.proposer import DFlashProposer
from sglang_dspark.families.dflash.shape import DFlashShape
from sglang_dspark.families.family import Family, Recipe

FAMILY = Family(
    name="dflash",
    architectures=(ARCHITECTURE,),
    config=DFlashConfig,
    model=DFlashDrafter,
    load=load_dflash,
    save=save_dflash,
    proposer=DFlashProposer,
    recipes=(Recipe("dflash", DFlashShape, learner.build, learner.shape_config),),
)
