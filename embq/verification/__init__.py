"""The checks behind `embq verify` and `embq doctor`, one file per thing that is checked."""
