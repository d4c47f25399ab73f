"""The checks behind `embq verify`, one file per thing that is checked."""
