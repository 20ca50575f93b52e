"""Mutants that operators generate from the product's syntax trees, drawn at random.

`python -m tests.mutants.generated` runs a drawn sample; `CONTRIBUTING.md` says how to read it.
"""
