"""From the options of `embq index` to a plan: codec, lists, memory and cost of each stage."""
