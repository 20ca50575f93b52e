"""Load tests of a running server: start it, send requests, measure times, write results.

sglang is not imported: servers are child processes, reached over HTTP.
"""
