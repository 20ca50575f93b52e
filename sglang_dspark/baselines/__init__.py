"""The drafters that DSpark is compared with, on the same data and features (paper, 5): DFlash (a
parallel block without a sequential head), Eagle3 and MTP (one layer, run once a token).

Each is written in the format that stock SGLang serves (DFLASH, EAGLE3, EAGLE) and proposes
drafts to the reference engine.
"""

from sglang_dspark.baselines.chain import ChainDrafter, ChainProposer
from sglang_dspark.baselines.dflash import DFlashConfig, DFlashDrafter, DFlashProposer
from sglang_dspark.baselines.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_dspark.baselines.mtp import MTPConfig, MTPDrafter

__all__ = [
    "ChainDrafter",
    "ChainProposer",
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashProposer",
    "Eagle3Config",
    "Eagle3Drafter",
    "MTPConfig",
    "MTPDrafter",
]
