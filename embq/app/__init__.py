"""What people use: the commands, the pages and servers, the functions of `import embq`."""
