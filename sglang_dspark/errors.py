"""Define the exception that users see: its text says what is wrong, where, and how to fix it."""


class DSparkError(Exception):
    """Bad input or an unusable environment; printed as a single line, never as a traceback."""
