"""All layers of a model in the short form: what fits, what it is, its tables, kernel and pass."""
