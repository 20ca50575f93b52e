"""Simulate the scheduler without a model: scenarios, rules, the oracle, and regret."""
