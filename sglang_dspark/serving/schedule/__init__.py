"""The planner of `sglang_dspark.schedule` at work in the server: profile, mode, step, metrics."""
