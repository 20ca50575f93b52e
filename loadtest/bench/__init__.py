"""Closed loops without locust: speculation against plain decoding, in pairs within one run."""
