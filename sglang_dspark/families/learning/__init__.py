"""Losses, batches and initial weights that the learners of all families share."""
