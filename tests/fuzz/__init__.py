"""Generated input: what users and other programs hand us, in thousands of broken shapes.

`make fuzz`, or `python -m tests.fuzz`, runs all of it; the tests here and
tests/integration/test_fuzzed_requests.py a small share with a fixed seed.
"""
