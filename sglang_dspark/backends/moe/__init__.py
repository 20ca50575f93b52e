"""Serve drafters with experts: SGLang's model class and its grouped products."""
