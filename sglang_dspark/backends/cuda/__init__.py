"""The device side of a decode step on an accelerator: events, admission, captured graphs."""
