"""Load on a running server: start it, send requests, take times, write results.

Imports no sglang: servers are child processes and are spoken to over HTTP.
"""
