"""MTP: one layer over its own hidden state, run once per token; SGLang's EAGLE."""

from sglang_dspark.families.chain.proposer import ChainProposer
from sglang_dspark.families.family import Family, Recipe
from sglang_dspark.families.mtp import learner
from sglang_dspark.families.mtp.checkpoint import load_mtp, save_mtp
from sglang_dspark.families.mtp.model import ARCHITECTURE, MTPConfig, MTPDrafter
from sglang_dspark.families.mtp.shape import MTPShape

FAMILY = Family(
    name="mtp",
    architectures=(ARCHITECTURE,),
    reads_features=False,
    config=MTPConfig,
    model=MTPDrafter,
    load=load_mtp,
    save=save_mtp,
    proposer=ChainProposer,
    recipes=(Recipe("mtp", MTPShape, learner.build),),
)
