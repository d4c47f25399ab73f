"""The MMoCLIP benchmark: OpenCLIP's ViT-L-14 on 3.2 million synthetic pairs, timed by open_clip's log.

`required` says what the benchmark fixes, `plan` and `run` train it, `folder` reads what a training left,
`judgement` says what it is worth, and `table`, `picture` and `scaling` show it.
"""
