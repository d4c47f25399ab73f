"""Parts of `embq enqueue`: uploads to the writer's machine, and estimates."""
