"""The face of embq: commands, web pages, servers, and the functions of `import embq`."""
