"""Run all layers of a model in one compiled call: specs, tables, kernel and pass."""
