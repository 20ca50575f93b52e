"""The synthetic traces of `configs/sweep/traces/`: small, in the formats of recorded ones."""
