"""One learner per kind of drafter; each module has `build(ingredients) -> Learner`."""
