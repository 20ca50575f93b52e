"""DSpark speculative decoding for SGLang: drafter, confidence-scheduled verification, serving."""

__version__ = "0.1.0"
