"""`embq train openclip`: OpenCLIP models trained by open_clip's own entry point, checked before and after."""
