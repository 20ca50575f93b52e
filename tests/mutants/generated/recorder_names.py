"""Names that the recorder and its reader share; the recorder begins to record as it is imported."""

RECORD_VARIABLE = "DSPARK_MUTANTS_RECORD"
DATA, SECONDS = "lines", "seconds"
