"""The scheduler without a model: scenarios, rules run against them, the oracle, and regret."""
