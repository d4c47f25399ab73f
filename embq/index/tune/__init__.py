"""Search parameters for a recall or latency target: query sets, exact neighbours, sweep and timing."""
