"""Closed loops without locust: drafts against none, measured in pairs in one run."""
