"""Verify drafts: the accept rules and the token that follows accepted drafts (paper, 3.1).

`greedy` is the accept rule of greedy requests, `rejection` and `block` are those of sampled ones,
`sampling` builds the distribution that plain decoding would sample from. `docs/losslessness.md` has
the proof that the rules do not change the output distribution.
"""

from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.block import accept_block
from sglang_dspark.verify.greedy import accept_greedy
from sglang_dspark.verify.rejection import accept_sampled, sample_inverse_cdf
from sglang_dspark.verify.sampling import BatchSampling, target_distribution

__all__ = [
    "Acceptance",
    "BatchSampling",
    "accept_block",
    "accept_greedy",
    "accept_sampled",
    "sample_inverse_cdf",
    "target_distribution",
]
