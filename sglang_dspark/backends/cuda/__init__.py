"""Run the decode step on an accelerator: events, admission, captured graphs."""
