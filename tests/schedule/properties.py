"""Set the number of examples of this folder's property tests.

By default 100 seeds, each of a hundred random cases: 10,000 cases in a few seconds. With
`pytest --hypothesis-profile=thorough tests/schedule` every case is an example of its own, 10,000 of
them, which hypothesis can shrink.
"""

from __future__ import annotations

from hypothesis import settings

THOROUGH = settings().max_examples >= 10_000  # the profile is defined in tests/conftest.py
EXAMPLES = settings(max_examples=10_000 if THOROUGH else 100, deadline=None)
CASES = 1 if THOROUGH else 100
