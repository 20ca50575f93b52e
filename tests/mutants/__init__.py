"""Faults put into a copy of the source, one at a time: each must make a named test fail.

`catalogue/` is the list, `make mutants` runs all of it (`__main__.py`).
"""
