"""Training of OpenCLIP models by open_clip's own entry point: checked before, cured where it fails, exported after."""
