"""`embq verify`: checks an output folder against its commit log and a second, independent reading of the inputs."""
