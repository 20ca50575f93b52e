"""Models that the package brings along: the demo target (built on this machine) and the drafters.

Nothing here imports torch, so a command can ask where a model lies without paying for it.
"""
