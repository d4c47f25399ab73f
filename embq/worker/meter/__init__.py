"""Measurements of one worker process: speed, time per stage, steps in progress, bottleneck."""
