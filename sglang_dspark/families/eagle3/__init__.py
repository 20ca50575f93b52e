"""Eagle3: one layer over fused features, run once per token; SGLang's EAGLE3."""

from sglang_dspark.families.chain.proposer import ChainProposer
from sglang_dspark.families.eagle3 import learner
from sglang_dspark.families.eagle3.checkpoint import load_eagle3, save_eagle3
from sglang_dspark.families.eagle3.model import ARCHITECTURE, Eagle3Config, Eagle3Drafter
from sglang_dspark.families.eagle3.shape import Eagle3Shape
from sglang_dspark.families.family import Family, Recipe

FAMILY = Family(
    name="eagle3",
    architectures=(ARCHITECTURE,),
    config=Eagle3Config,
    model=Eagle3Drafter,
    load=load_eagle3,
    save=save_eagle3,
    proposer=ChainProposer,
    recipes=(Recipe("eagle3", Eagle3Shape, learner.build),),
)
